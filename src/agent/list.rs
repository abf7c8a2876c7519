//! The changes that wait for the agent.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use thruway_guest::protocol::{Change, Place, ops};

use super::Work;
use crate::watch::FileId;

/// How many changes one look passes over because their directory or node is with another thread. Those behind them wait
/// for the next look.
const PASSED: usize = 1024;

/// What one thread works on no other may work on: directories and nodes.
pub fn ids(change: &Change) -> impl Iterator<Item = u64> {
    [change.place.dir, change.to.dir, change.node].into_iter().filter(|id| *id != 0 && !super::is_phantom(*id))
}

struct Waiting {
    change: Change,
    file: Option<FileId>,
    other: Other,
    since: Instant,
}

/// The file that an exchange moves the other way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Other {
    /// 0 if the guest does not know it.
    pub node: u64,
    /// It is a directory.
    pub directory: bool,
}

/// A change, and the files that it is of.
pub type Taken = (Change, Option<FileId>, Other);

/// The changes in their order.
#[derive(Default)]
pub struct List {
    changes: BTreeMap<i64, Waiting>,
    /// The last change of a name.
    last: HashMap<Place, i64>,
    /// The last change of a node without a name.
    last_of: HashMap<u64, i64>,
    /// How many may move a directory.
    moves: usize,
}

impl List {
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether any of them may move a directory.
    pub fn has_moves(&self) -> bool {
        self.moves > 0
    }

    /// Whether a change that waits makes this name, or moves something to it.
    pub fn makes(&self, dir: u64, name: &[u8]) -> bool {
        let change = match self.changes.is_empty() {
            true => return false,
            false => self.last.get(&Place { dir, name: name.to_vec() }).and_then(|at| self.changes.get(at)),
        };
        change.is_some_and(|waiting| {
            let Change { place, to, .. } = &waiting.change;
            let is = |place: &Place| place.dir == dir && place.name == name;
            is(place) && waiting.change.has(ops::CREATE) || is(to)
        })
    }

    /// Since when the oldest change waits.
    pub fn oldest(&self) -> Option<Instant> {
        self.changes.first_key_value().map(|(_, first)| first.since)
    }

    fn last(&self, change: &Change) -> Option<i64> {
        match change.place.is_none() {
            true => self.last_of.get(&change.node).copied(),
            false => self.last.get(&change.place).copied(),
        }
    }

    /// Adds a change, or makes it part of one that waits.
    pub fn add(&mut self, change: Change, file: Option<FileId>, now: Instant) {
        let tail = self.changes.last_key_value().map(|(at, _)| *at);
        // The changes of names keep their order.
        let before = self.last(&change).filter(|at| !change.has(ops::REMOVE) || Some(*at) == tail);
        let before = before.and_then(|at| self.changes.get_mut(&at));
        let merges = |before: &mut Waiting| before.file == file && merge(&mut before.change, &change);
        if before.is_some_and(merges) || self.exchanges(&change) {
            return;
        }
        let at = self.changes.last_key_value().map_or(0, |(at, _)| at + 1);
        self.enter(at, Waiting { change, file, other: Other::default(), since: now });
    }

    /// Puts changes before all others.
    pub fn put_back(&mut self, work: Vec<Work>, since: Instant) {
        for Work { change, file, other, .. } in work.into_iter().rev() {
            let at = self.changes.first_key_value().map_or(0, |(at, _)| at - 1);
            let plain = |place: Place| Place { dir: if super::is_phantom(place.dir) { 0 } else { place.dir }, ..place };
            let change = Change { place: plain(change.place), to: plain(change.to), ..change };
            self.moves += usize::from(change.moves_directory());
            self.changes.insert(at, Waiting { change, file, other, since });
        }
    }

    fn enter(&mut self, at: i64, waiting: Waiting) {
        let change = &waiting.change;
        if change.place.is_none() {
            self.last_of.insert(change.node, at);
        } else {
            self.last.insert(change.place.clone(), at);
        }
        if !change.to.is_none() {
            self.last.insert(change.to.clone(), at);
        }
        self.moves += usize::from(change.moves_directory());
        self.changes.insert(at, waiting);
    }

    /// The host's kernel reports an exchange as two renames. Whether this is the second.
    fn exchanges(&mut self, change: &Change) -> bool {
        let Some(mut last) = self.changes.last_entry() else { return false };
        let Waiting { change: before, other, .. } = last.get_mut();
        let is = before.has(ops::RENAME)
            && change.has(ops::RENAME)
            && before.place == change.to
            && before.to == change.place
            && before.place.dir != 0
            && before.to.dir != 0;
        if is {
            self.moves += usize::from(!before.moves_directory());
            before.ops = before.ops & !ops::RENAME | ops::EXCHANGE;
            *other = Other { node: change.node, directory: change.has(ops::DIRECTORY) };
        }
        is
    }

    /// Takes changes, as long as they fit into `room` bytes, and as their directories and nodes are not `busy`. Also
    /// says since when the first has waited.
    pub fn take(&mut self, busy: &mut HashSet<u64>, room: &mut usize) -> (Vec<Taken>, Option<Instant>) {
        let (mut names, mut nodes, mut taken, mut passed) = (HashSet::new(), HashSet::new(), Vec::new(), 0);
        for (at, Waiting { change, .. }) in &self.changes {
            if ids(change).any(|id| busy.contains(&id)) {
                busy.extend(ids(change));
                passed += 1;
                if passed == PASSED {
                    break;
                }
                continue;
            }
            let places = [&change.place, &change.to].into_iter().filter(|place| !place.is_none());
            let twice = places.clone().any(|place| names.contains(place)) || nodes.contains(&change.node);
            if twice || change.encoded_len() > *room {
                break;
            }
            names.extend(places.cloned());
            nodes.extend([change.node].into_iter().filter(|node| *node != 0));
            *room -= change.encoded_len();
            taken.push(*at);
        }
        let mut since = None;
        let changes = taken.into_iter().filter_map(|at| {
            let waiting = self.changes.remove(&at)?;
            self.moves -= usize::from(waiting.change.moves_directory());
            since = since.or(Some(waiting.since));
            for place in [&waiting.change.place, &waiting.change.to] {
                if self.last.get(place) == Some(&at) {
                    self.last.remove(place);
                }
            }
            if self.last_of.get(&waiting.change.node) == Some(&at) {
                self.last_of.remove(&waiting.change.node);
            }
            Some((waiting.change, waiting.file, waiting.other))
        });
        (changes.collect(), since)
    }
}

/// Makes a change part of an earlier one of the same name, if watchers miss nothing by that.
fn merge(before: &mut Change, change: &Change) -> bool {
    let apart = ops::RENAME | ops::EXCHANGE | ops::REMOVE | ops::REFRESH;
    let same_node = before.node == change.node || before.node == 0 || change.node == 0;
    if before.has(apart) || !same_node || before.has(ops::DIRECTORY) != change.has(ops::DIRECTORY) {
        return false;
    }
    if change.has(ops::CREATE | ops::RENAME | ops::EXCHANGE | ops::REFRESH) {
        return false;
    }
    before.ops |= change.ops;
    before.node = before.node.max(change.node);
    true
}
