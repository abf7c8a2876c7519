//! A guest whose agent hears of changes and repeats none, for tests that need leases.

use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};
use thruway::agent::{Agents, Look, Made};
use thruway::fs::PassthroughFs;
use thruway::fuse::abi::ROOT_ID;
use thruway::fuse::ops::Repeats;
use thruway_guest::protocol::{Batch, Change, Done, MARKER, VERSION};

/// Its thread id.
const AGENT: u32 = 7;

/// The agent. It acknowledges each change at once.
pub struct Listening {
    agents: Weak<Agents>,
    /// What it has heard.
    pub told: Mutex<Vec<Change>>,
    /// There is more.
    pub changed: Condvar,
}

impl Listening {
    /// Registers, and hears of changes from then on. `fs` has a watch.
    pub fn start(fs: &PassthroughFs) -> Arc<Self> {
        let agents = fs.agents().unwrap();
        let token = agents.hello(AGENT, VERSION).unwrap().token;
        let Look::Phantom(hidden) = agents.look(AGENT, ROOT_ID, ROOT_ID, token.as_bytes()) else { panic!("unknown") };
        let made = agents.make(AGENT, 0, hidden, MARKER.as_bytes(), false);
        assert!(matches!(made, Made::Marker(_)), "{made:?}");
        fs.follow_known();
        let (told, changed) = Default::default();
        let all = Arc::new(Self { agents: Arc::downgrade(agents), told, changed });
        all.listen(0);
        all
    }

    /// Waits for changes. `batch` has been done.
    fn listen(self: &Arc<Self>, batch: u64) {
        let Some(agents) = self.agents.upgrade() else { return };
        // The guest has missed nothing that these tests look for.
        agents.look_again(Vec::new);
        let all = self.clone();
        let answer = move |bytes: Vec<u8>| {
            let batch = Batch::decode(&bytes).unwrap();
            all.told.lock().extend(batch.changes);
            all.changed.notify_all();
            all.listen(batch.id);
        };
        // The session may be over.
        let _ = agents.wait(AGENT, Done { batch, ..Done::default() }, Box::new(answer), || false);
    }
}
