//! What the guest's agent is to repeat: changes by others (docs/guest-agent.md).

use thruway_guest::protocol::{Change as Announced, Place, ops};

use crate::agent::Agents;
use crate::limits::AGENT_NAME;
use crate::watch::Change;

/// Has the agent repeat a change that the watch has seen.
pub(super) fn change(agents: &Agents, change: &Change) {
    let has = |bits: u64| change.mask & bits != 0;
    let kind = if has(libc::FAN_ONDIR) { ops::DIRECTORY } else { 0 };
    let place = |dir: u64, name: &[u8]| Place { dir, name: name.to_vec() };
    let here = if change.dir == 0 { Place::default() } else { place(change.dir, change.name) };
    if change.name.len() > AGENT_NAME || change.to.is_some_and(|(_, name)| name.len() > AGENT_NAME) {
        // No file system that can be watched has such names.
        return agents.lose();
    }
    let tell = |ops: u16, place: Place, to: Place| {
        agents.announce(Announced { ops: ops | kind, node: change.node, place, to }, change.file);
    };
    // One event of the host may stand for several. This is the usual order.
    if has(libc::FAN_CREATE) && change.dir != 0 {
        tell(ops::CREATE, here.clone(), Place::default());
    }
    if let Some((newdir, newname)) = change.to.filter(|(newdir, _)| change.dir != 0 || *newdir != 0) {
        // The kernel names only directories that are watched. Any name does for a place that the guest does not know.
        let name = if change.dir == 0 { newname } else { change.name };
        let newname = if newdir == 0 { name } else { newname };
        tell(ops::RENAME, place(change.dir, name), place(newdir, newname));
    }
    let same: u16 =
        [(libc::FAN_MODIFY, ops::CONTENTS), (libc::FAN_CLOSE_WRITE, ops::CLOSED), (libc::FAN_ATTRIB, ops::ATTRIBUTES)]
            .into_iter()
            .filter(|(bit, _)| has(*bit))
            .map(|(_, ops)| ops)
            .sum();
    // Where it is now.
    let now = match change.to {
        Some((0, _)) => Place::default(),
        Some((dir, name)) => place(dir, name),
        None => here.clone(),
    };
    if same != 0 && (change.node != 0 || !now.is_none()) {
        tell(same, now, Place::default());
    }
    if has(libc::FAN_DELETE) && change.dir != 0 {
        tell(ops::REMOVE, here, Place::default());
    }
}

/// Has the agent look at a node again.
pub(super) fn look_again(agents: &Agents, node: u64) {
    agents.announce(Announced { ops: ops::REFRESH, node, ..Announced::default() }, None);
}

/// Has the agent look a name up again.
pub(super) fn look_up_again(agents: &Agents, dir: u64, name: &[u8]) {
    if name.len() > AGENT_NAME {
        return agents.lose();
    }
    let place = Place { dir, name: name.to_vec() };
    agents.announce(Announced { ops: ops::REFRESH, place, ..Announced::default() }, None);
}
