use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

use thruway_guest::protocol::MARKER;

use super::*;

/// The root's nodeid.
const ROOT: u64 = 1;

/// Agents with a clock that stands.
struct Guest {
    agents: Arc<Agents>,
    /// Milliseconds.
    now: Arc<AtomicU64>,
}

/// A thread of the agent.
struct Hand {
    pid: u32,
    hidden: u64,
    marker: u64,
    batch: u64,
    got: Option<Receiver<Vec<u8>>>,
}

impl Guest {
    fn new() -> Self {
        let (start, now) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let clock = now.clone();
        let agents = Agents::with_clock(Box::new(move || start + Duration::from_millis(clock.load(Ordering::SeqCst))));
        Self { agents: Arc::new(agents), now }
    }

    fn pass(&self, time: Duration) {
        self.now.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    /// Registers a thread as the agent does.
    fn hand(&self, pid: u32) -> Hand {
        let hello = self.agents.hello(pid, VERSION).unwrap();
        let Look::Phantom(hidden) = self.agents.look(pid, ROOT, ROOT, hello.token.as_bytes()) else { panic!() };
        assert!(matches!(self.agents.look(pid, ROOT, hidden, MARKER.as_bytes()), Look::Missing));
        let Made::Marker(marker) = self.agents.make(pid, 0, hidden, MARKER.as_bytes(), false) else { panic!() };
        // The guest knows no file yet.
        self.agents.look_again(Vec::new);
        Hand { pid, hidden, marker, batch: 0, got: None }
    }

    /// Nobody has begun to look at everything.
    fn has_lost(&self) -> bool {
        self.agents.state.lock().lost
    }

    fn wait(&self, hand: &mut Hand) -> Result<()> {
        self.wait_while(hand, false)
    }

    fn wait_while(&self, hand: &mut Hand, stops: bool) -> Result<()> {
        let (send, got) = channel();
        let done = Done { batch: hand.batch, ..Done::default() };
        self.agents.wait(hand.pid, done, Box::new(move |bytes| drop(send.send(bytes))), || stops)?;
        hand.got = Some(got);
        Ok(())
    }

    /// What a thread that waits has got.
    fn got(hand: &mut Hand) -> Option<Vec<Change>> {
        let batch = Batch::decode(&hand.got.as_ref()?.try_recv().ok()?).unwrap();
        hand.batch = batch.id;
        Some(batch.changes)
    }

    fn tell(&self, changes: impl IntoIterator<Item = Change>) {
        changes.into_iter().for_each(|change| self.agents.announce(change, None));
        self.agents.hand_out();
    }
}

fn at(ops: u16, dir: u64, name: &str) -> Change {
    Change { ops, place: Place { dir, name: name.into() }, ..Change::default() }
}

fn moved(ops: u16, (dir, name): (u64, &str), (newdir, newname): (u64, &str)) -> Change {
    Change { to: Place { dir: newdir, name: newname.into() }, ..at(ops, dir, name) }
}

#[test]
fn only_root_registers_and_a_process_that_ends_is_forgotten() {
    let guest = Guest::new();
    assert_eq!(guest.agents.hello(0, VERSION), Err(Errno::SRCH));
    assert_eq!(guest.agents.hello(7, VERSION + 1), Err(Errno::PROTO));
    let hello = guest.agents.hello(7, VERSION).unwrap();
    let Look::Phantom(hidden) = guest.agents.look(7, ROOT, ROOT, hello.token.as_bytes()) else { panic!() };
    // Nobody else sees it, and only root may make the marker.
    assert!(matches!(guest.agents.look(8, ROOT, ROOT, hello.token.as_bytes()), Look::AsOthers));
    assert_eq!(guest.agents.make(7, 1000, hidden, MARKER.as_bytes(), false), Made::Refused);
    let mut seven = Hand { pid: 7, hidden, marker: 0, batch: 0, got: None };
    assert_eq!(guest.wait(&mut seven), Err(Errno::NOTCONN));
    let Made::Marker(marker) = guest.agents.make(7, 0, hidden, MARKER.as_bytes(), false) else { panic!() };
    assert!(guest.agents.knows(7) && !guest.agents.is_current());
    guest.agents.look_again(Vec::new);
    guest.wait(&mut seven).unwrap();
    assert_eq!(guest.wait(&mut seven), Err(Errno::BUSY));
    assert!(guest.agents.is_current());
    guest.agents.forgot(marker);
    // Its thread id may be another process's now.
    assert!(!guest.agents.knows(7) && !guest.agents.is_current());
    assert_eq!(guest.wait(&mut seven), Err(Errno::NOTCONN));
}

#[test]
fn threads_are_bounded() {
    let guest = Guest::new();
    let hands: Vec<Hand> = (1..=AGENT_THREADS as u32).map(|pid| guest.hand(pid)).collect();
    assert_eq!(guest.agents.hello(1000, VERSION), Err(Errno::USERS));
    guest.agents.forgot(hands[3].marker);
    guest.agents.hello(1000, VERSION).unwrap();
    // One that does not go on gives way.
    guest.agents.hello(1001, VERSION).unwrap();
    assert!(!guest.agents.knows(1000) && guest.agents.knows(1001));
}

#[test]
fn changes_come_in_order_and_merge_without_loss() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.tell([
        at(ops::CREATE, 2, "a"),
        at(ops::CONTENTS, 2, "a"),
        at(ops::CREATE, 2, "b"),
        at(ops::CONTENTS | ops::CLOSED, 2, "a"),
        at(ops::CREATE, 2, "c"),
        at(ops::REMOVE, 2, "c"),
        moved(ops::RENAME, (2, "b"), (3, "d")),
        at(ops::REMOVE, 2, "a"),
        at(ops::CREATE, 2, "a"),
    ]);
    guest.wait(&mut hand).unwrap();
    let first = [
        at(ops::CREATE | ops::CONTENTS | ops::CLOSED, 2, "a"),
        at(ops::CREATE, 2, "b"),
        // It came and went.
        at(ops::CREATE | ops::REMOVE, 2, "c"),
    ];
    assert_eq!(Guest::got(&mut hand).unwrap(), first);
    // No two changes of one name are in a batch: a request belongs to one change.
    guest.wait(&mut hand).unwrap();
    assert_eq!(Guest::got(&mut hand).unwrap(), [moved(ops::RENAME, (2, "b"), (3, "d")), at(ops::REMOVE, 2, "a")]);
    guest.wait(&mut hand).unwrap();
    assert_eq!(Guest::got(&mut hand).unwrap(), [at(ops::CREATE, 2, "a")]);
    guest.wait(&mut hand).unwrap();
    assert_eq!((Guest::got(&mut hand), guest.agents.facts().counts.repeated), (None, 6));
}

#[test]
fn a_tree_goes_from_its_leaves() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    let directory = |node, dir, name| Change { node, ..at(ops::REMOVE | ops::DIRECTORY, dir, name) };
    let all = [at(ops::REMOVE, 4, "file"), directory(4, 3, "y"), directory(3, 2, "x")];
    guest.tell(all.clone());
    guest.wait(&mut hand).unwrap();
    // Watchers of each of them hear of what was in it.
    assert_eq!(Guest::got(&mut hand).unwrap(), all);
}

#[test]
fn two_renames_of_one_call_are_an_exchange() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.tell([moved(ops::RENAME, (2, "a"), (3, "b")), moved(ops::RENAME, (3, "b"), (2, "a"))]);
    guest.wait(&mut hand).unwrap();
    assert_eq!(Guest::got(&mut hand).unwrap(), [moved(ops::EXCHANGE, (2, "a"), (3, "b"))]);
}

#[test]
fn a_directory_that_nobody_knows_is_the_hidden_one() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.tell([moved(ops::RENAME, (0, "far"), (2, "near"))]);
    guest.wait(&mut hand).unwrap();
    Guest::got(&mut hand).unwrap();
    assert!(guest.agents.moves(7, (hand.hidden, b"far"), (2, b"near")).is_some());
    assert!(guest.agents.moves(7, (2, b"far"), (2, b"near")).is_none());
    // The thread is gone: another one has a hidden directory of its own.
    let mut other = guest.hand(8);
    guest.agents.forgot(hand.marker);
    guest.wait(&mut other).unwrap();
    assert_eq!(Guest::got(&mut other).unwrap(), [moved(ops::RENAME, (0, "far"), (2, "near"))]);
    assert!(guest.agents.moves(8, (other.hidden, b"far"), (2, b"near")).is_some());
}

#[test]
fn requests_belong_to_what_was_announced() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.tell([
        at(ops::CREATE, 2, "new"),
        at(ops::CREATE | ops::DIRECTORY, 2, "dir"),
        Change { node: 9, ..at(ops::REMOVE, 2, "old") },
    ]);
    guest.wait(&mut hand).unwrap();
    assert!(!guest.agents.works(8) && guest.agents.works(7));
    Guest::got(&mut hand).unwrap();
    assert_eq!(guest.agents.make(8, 0, 2, b"new", false), Made::Refused);
    assert_eq!(guest.agents.make(7, 0, 2, b"other", false), Made::Refused);
    assert_eq!(guest.agents.make(7, 0, 2, b"dir", false), Made::Refused);
    assert!(matches!(guest.agents.make(7, 0, 2, b"dir", true), Made::Name(_)));
    // Once.
    assert_eq!(guest.agents.make(7, 0, 2, b"dir", true), Made::Refused);
    assert!(guest.agents.removes(7, 2, b"old", true).is_none());
    assert!(guest.agents.removes(7, 2, b"old", false).is_some());
    // The change knows its node.
    assert_eq!(guest.agents.found(7, Found { index: 2, node: 10 }, None), Err(Errno::INVAL));
    guest.agents.give_up(7, 2, b"old");
    assert!(guest.agents.removes(7, 2, b"old", false).is_none());
    assert_eq!(guest.agents.found(7, Found { index: 3, node: 1 }, None), Err(Errno::INVAL));
    guest.wait(&mut hand).unwrap();
    assert!(!guest.agents.works(7));
}

#[test]
fn another_thread_goes_on_with_other_directories_when_one_is_held_up() {
    let guest = Guest::new();
    let (mut first, mut second) = (guest.hand(7), guest.hand(8));
    guest.wait(&mut first).unwrap();
    guest.wait(&mut second).unwrap();
    guest.tell([at(ops::CREATE, 2, "a")]);
    assert_eq!(Guest::got(&mut first).unwrap(), [at(ops::CREATE, 2, "a")]);
    guest.tell([at(ops::CREATE, 2, "b"), at(ops::CREATE, 3, "c"), at(ops::CREATE, 2, "d")]);
    assert_eq!(Guest::got(&mut second), None);
    guest.pass(HELD_UP);
    guest.agents.expire();
    assert_eq!(Guest::got(&mut second).unwrap(), [at(ops::CREATE, 3, "c")]);
    // There are no leases while changes wait.
    guest.pass(AGENT_PATIENCE);
    assert!(!guest.agents.is_current());
    guest.wait(&mut second).unwrap();
    assert_eq!(Guest::got(&mut second), None);
    guest.wait(&mut first).unwrap();
    let both: Vec<Change> = [&mut first, &mut second].into_iter().filter_map(Guest::got).flatten().collect();
    assert_eq!(both, [at(ops::CREATE, 2, "b"), at(ops::CREATE, 2, "d")]);
}

#[test]
fn a_wait_ends_in_time_and_with_its_queue() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.wait(&mut hand).unwrap();
    guest.pass(Duration::from_millis(u64::from(WAIT_MS) - 1));
    guest.agents.expire();
    assert_eq!(Guest::got(&mut hand), None);
    guest.pass(Duration::from_millis(1));
    guest.agents.expire();
    assert_eq!(Guest::got(&mut hand), Some(Vec::new()));
    // Between two waits nothing is lost, and there are leases for a moment.
    assert!(guest.agents.is_current());
    guest.tell([at(ops::CREATE, 2, "a")]);
    guest.wait(&mut hand).unwrap();
    assert_eq!(Guest::got(&mut hand).unwrap().len(), 1);
    guest.wait_while(&mut hand, true).unwrap();
    assert_eq!(Guest::got(&mut hand), Some(Vec::new()));
    guest.wait(&mut hand).unwrap();
    guest.agents.release();
    assert_eq!(Guest::got(&mut hand), Some(Vec::new()));
    guest.pass(AGENT_PATIENCE);
    assert!(!guest.agents.is_current());
}

#[test]
fn what_was_not_acknowledged_is_done_again() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.tell([at(ops::CREATE, 2, "a")]);
    guest.wait(&mut hand).unwrap();
    Guest::got(&mut hand).unwrap();
    hand.batch += 1;
    guest.wait(&mut hand).unwrap();
    assert_eq!(Guest::got(&mut hand).unwrap(), [at(ops::CREATE, 2, "a")]);
    let mut other = guest.hand(8);
    guest.agents.forgot(hand.marker);
    guest.wait(&mut other).unwrap();
    assert_eq!(Guest::got(&mut other).unwrap(), [at(ops::CREATE, 2, "a")]);
}

#[test]
fn too_many_changes_become_a_look_at_everything() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    let refused = Limit::AgentChanges.times();
    guest.tell((0..AGENT_CHANGES).map(|n| at(ops::CREATE, 2, &n.to_string())));
    assert!(!guest.has_lost());
    guest.tell([at(ops::CREATE, 2, "one more"), at(ops::CREATE, 2, "and another")]);
    assert!(guest.has_lost() && Limit::AgentChanges.times() > refused);
    guest.agents.look_again(|| {
        assert!(!guest.agents.is_current());
        vec![5, 6]
    });
    guest.wait(&mut hand).unwrap();
    let look = |node| Change { ops: ops::REFRESH, node, ..Change::default() };
    assert_eq!(Guest::got(&mut hand).unwrap(), [look(6), look(5)]);
    guest.wait(&mut hand).unwrap();
    assert!(guest.agents.is_current());
    assert_eq!(guest.agents.facts().counts.lost, 1);
    guest.agents.lose();
    assert!(!guest.agents.is_current());
    // It hears of it at once: with its next wait the nodes are gathered.
    guest.agents.hand_out();
    assert_eq!(Guest::got(&mut hand).unwrap(), []);
}

#[test]
fn the_first_agent_looks_at_everything() {
    let guest = Guest::new();
    let hand = guest.hand(7);
    // A second one has missed nothing.
    guest.tell([at(ops::CREATE, 2, "a")]);
    let second = guest.hand(8);
    assert!(!guest.has_lost() && guest.agents.facts().waiting == 1);
    // What happens while there is none is not announced.
    guest.agents.forgot(hand.marker);
    guest.agents.forgot(second.marker);
    assert!(guest.has_lost() && guest.agents.facts().waiting == 0);
    guest.agents.hello(9, VERSION).unwrap();
    assert!(guest.has_lost());
}

#[test]
fn what_is_announced_while_nodes_are_gathered_is_not_lost() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.agents.lose();
    guest.agents.look_again(|| {
        guest.tell([at(ops::CREATE, 2, "a")]);
        vec![5]
    });
    guest.wait(&mut hand).unwrap();
    let look = Change { ops: ops::REFRESH, node: 5, ..Change::default() };
    assert_eq!(Guest::got(&mut hand).unwrap(), [at(ops::CREATE, 2, "a"), look]);
    // Nor are further losses.
    guest.agents.lose();
    guest.agents.look_again(|| {
        guest.agents.lose();
        vec![5]
    });
    assert!(guest.has_lost() && guest.agents.facts().waiting == 2);
}

#[test]
fn what_was_told_of_a_name_is_known() {
    let guest = Guest::new();
    guest.agents.tell(2, b"a", 9);
    // There is no agent.
    assert!(!guest.agents.was_told(2, b"a", 9));
    guest.hand(7);
    guest.agents.tell(2, b"a", 9);
    assert!(guest.agents.was_told(2, b"a", 9));
    assert!(!guest.agents.was_told(2, b"a", 8) && !guest.agents.was_told(3, b"a", 9));
    guest.agents.tell(2, b"a", 0);
    assert!(!guest.agents.was_told(2, b"a", 9));
}

#[test]
fn a_session_ends_with_all_of_it() {
    let guest = Guest::new();
    let mut hand = guest.hand(7);
    guest.wait(&mut hand).unwrap();
    guest.tell([]);
    guest.agents.clear();
    assert!(!guest.agents.any() && hand.got.unwrap().recv().is_err());
    let moved = guest.hand(8);
    assert!(moved.hidden != hand.hidden);
}
