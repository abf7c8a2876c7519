use std::sync::mpsc::{Receiver, channel};

use super::*;

/// A throttle whose clock the test moves.
struct Test {
    throttle: Arc<Throttle>,
    now: Arc<Mutex<Instant>>,
}

impl Test {
    fn new(iops: &str, bandwidth: &str) -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let theirs = now.clone();
        let clock = Box::new(move || *theirs.lock());
        let throttle = Throttle::with_clock(clock);
        throttle.set(rates(iops), rates(bandwidth));
        Self { throttle, now }
    }

    fn pass(&self, time: Duration) {
        *self.now.lock() += time;
    }

    /// How many requests of this kind may begin now.
    fn admitted(&self, kind: Kind, bytes: u64) -> usize {
        (0..100_000).take_while(|_| self.throttle.admit(kind, bytes)).count()
    }

    /// Has a request wait, without the thread that would end the wait.
    fn wait(&self, kind: Kind, bytes: u64) -> Receiver<()> {
        let (served, is) = channel();
        self.throttle.state.lock().runs = true;
        self.throttle.wait(kind, bytes, Box::new(move || served.send(()).unwrap()));
        is
    }

    fn look(&self) {
        let mut state = self.throttle.state.lock();
        state.fill((self.throttle.clock)());
        let ready = state.ready();
        drop(state);
        ready.into_iter().for_each(|serve| serve());
    }
}

fn rates(text: &str) -> Rates {
    Rates::iops(text).unwrap()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn limits_are_parsed_and_printed() {
    for text in ["", "500,burst=1", "500,read=10,burst=3600", "read=1,write=2,metadata=3,burst=2"] {
        assert_eq!(rates(text).to_string(), text);
    }
    assert_eq!(rates("burst=5").to_string(), "");
    assert_eq!(rates("500"), Rates { total: 500, ..Rates::default() });
    for text in ["0", "read=0", "x", "reads=1", "read", "burst=0", "burst=3601", "burst=x", ",", "1,", "-1", "read="] {
        assert!(Rates::iops(text).is_err(), "{text}");
    }
    assert_eq!(Rates::bandwidth("read=2M"), Ok(rates("read=2097152")));
    assert!(Rates::bandwidth("metadata=2M").is_err() && Rates::iops("2M").is_err());
}

#[test]
fn an_idle_guest_saves_up_a_burst_and_no_more() {
    let test = Test::new("100,burst=3", "");
    assert_eq!(test.admitted(Kind::Metadata, 0), 301);
    test.pass(SECOND / 2);
    assert_eq!(test.admitted(Kind::Read, 1 << 20), 50);
    test.pass(1000 * SECOND);
    assert_eq!(test.admitted(Kind::Write, 0), 301);
}

#[test]
fn each_kind_has_its_own_limit() {
    let test = Test::new("read=10,metadata=1000", "write=1000000");
    assert_eq!(test.admitted(Kind::Read, 4096), 11);
    assert_eq!(test.admitted(Kind::Metadata, 0), 1001);
    // A request that is larger than what is left leaves a debt.
    assert_eq!(test.admitted(Kind::Write, 3_000_000), 1);
    test.pass(SECOND);
    assert_eq!((test.admitted(Kind::Write, 1), test.admitted(Kind::Read, 0)), (0, 10));
    test.pass(SECOND);
    assert_eq!(test.admitted(Kind::Write, 1), 1);
    // What a copy has moved is known when it is done.
    test.pass(2 * SECOND);
    test.throttle.charge(Kind::Write, 1_500_000);
    assert_eq!(test.admitted(Kind::Write, 1), 0);
    test.pass(SECOND);
    assert!(test.admitted(Kind::Write, 1000) > 0);
}

#[test]
fn those_who_wait_come_first_and_hold_back_no_other_kind() {
    let test = Test::new("read=10", "");
    assert_eq!(test.admitted(Kind::Read, 0), 11);
    let waits: Vec<_> = (0..3).map(|_| test.wait(Kind::Read, 0)).collect();
    assert!(!test.throttle.admit(Kind::Read, 0) && test.throttle.admit(Kind::Metadata, 0));
    assert_eq!(test.throttle.waits(), Waits { now: [3, 0, 0], so_far: [3, 0, 0] });
    assert_eq!(test.throttle.state.lock().shortest_wait(), Some(SECOND / 10));
    test.look();
    assert!(waits[0].try_recv().is_err());
    test.pass(SECOND / 5);
    // Nobody who comes now is before them.
    assert!(!test.throttle.admit(Kind::Read, 0));
    test.look();
    assert!(waits[0].try_recv().is_ok() && waits[1].try_recv().is_ok() && waits[2].try_recv().is_err());
    test.pass(SECOND);
    test.look();
    assert!(waits[2].try_recv().is_ok() && test.throttle.admit(Kind::Read, 0));
}

#[test]
fn all_kinds_share_the_total_in_the_order_in_which_they_came() {
    let test = Test::new("10,write=1", "");
    assert_eq!(test.admitted(Kind::Metadata, 0), 11);
    let order = [Kind::Write, Kind::Read, Kind::Write, Kind::Metadata].map(|kind| test.wait(kind, 0));
    test.pass(SECOND / 10);
    // A kind that does not wait does not pass by those who do.
    assert!(!test.throttle.admit(Kind::Metadata, 0));
    test.look();
    let served = |order: &[Receiver<()>; 4]| order.each_ref().map(|waits| waits.try_recv().is_ok());
    assert_eq!(served(&order), [true, false, false, false]);
    test.pass(SECOND / 5);
    test.look();
    assert_eq!(served(&order), [false, true, true, false]);
    test.pass(SECOND / 10);
    test.look();
    assert_eq!(served(&order), [false, false, false, true]);
}

#[test]
fn a_release_and_the_end_of_the_limits_serve_all() {
    let test = Test::new("write=1", "");
    while test.throttle.admit(Kind::Write, 0) {}
    let waits = [test.wait(Kind::Write, 0), test.wait(Kind::Write, 0)];
    test.throttle.release();
    assert!(waits.iter().all(|waits| waits.try_recv().is_ok()));
    let waits = [test.wait(Kind::Write, 0), test.wait(Kind::Write, 0)];
    test.throttle.set(Rates::default(), Rates::default());
    assert!(!test.throttle.is_on());
    test.look();
    assert!(waits.iter().all(|waits| waits.try_recv().is_ok()));
}

#[test]
fn a_thread_ends_the_waits_while_there_are_any() {
    let throttle = Throttle::new();
    throttle.set(rates("read=1000000"), Rates::default());
    for _ in 0..3 {
        throttle.charge(Kind::Read, 0);
        throttle.state.lock().requests.take(Kind::Read, 1_001_000);
        let (served, is) = channel();
        throttle.wait(Kind::Read, 0, Box::new(move || served.send(()).unwrap()));
        is.recv().unwrap();
    }
    assert_eq!(throttle.waits(), Waits { now: [0; 3], so_far: [3, 0, 0] });
}
