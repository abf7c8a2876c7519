#!/usr/bin/env python3
"""The guest agent's life in a stock guest: agent-life.py MOUNTS SHARES. What becomes of it, of a second one, of mounts on what the host
makes, in other mount namespaces, with SHARES shares, and beside a process that swaps names."""

import ctypes
import errno
import json
import mmap
import os
import select
import signal
import subprocess
import sys

sys.path.insert(0, "/host")
import oracle
from rings import address
from window import *

# A limit on hangs, in seconds.
LIMIT = 100
# Fewer than the daemon keeps for the agent.
MANY = 10_000
mounts, shares = int(sys.argv[1]), int(sys.argv[2])
number = 0
agent = None


def wait(fd):
    ready, _, _ = select.select([fd], [], [], LIMIT)
    assert ready, "no event came"


def status(share="s"):
    """What the daemon says of the agent."""
    return json.loads(host(f"curl --silent --show-error --unix-socket $work/sockets/{share}.control http://daemon/status"))["agent"]


def is_status(**due):
    seen(f"agent {due}", lambda: {key: status()[key] for key in due}, due)


def hears(directory, *commands):
    """The events of a directory that the host's commands cause."""
    global number
    number += 1
    watcher = oracle.Watcher([directory])
    for command in commands:
        host(command)
    # The host makes it in another process.
    there = directory.replace("/mnt/", "../")
    host(f"touch {there}/{oracle.SENTINEL}{number}")
    events = [(mask, name) for _, mask, _, name in watcher.until(f"{oracle.SENTINEL}{number}", wait)]
    os.close(watcher.fd)
    host(f"rm {there}/{oracle.SENTINEL}{number}")
    return events


def is_alive():
    assert agent.poll() is None, f"the agent has ended: {read('/tmp/agent.log').decode()}"
    equal(hears("d", "mkdir d/alive", "rmdir d/alive"), [(oracle.CREATE | oracle.ISDIR, "alive"), (oracle.DELETE | oracle.ISDIR, "alive")])


def beside(function, command, rounds=3):
    """The host runs a command again and again, and a process of the guest does some rounds of a function after each."""
    with Busy(function, function.__name__) as busy:
        for _ in range(20):
            start = busy.rounds()
            host(command)
            while busy.rounds() < start + rounds:
                time.sleep(0.001)


def mounts_stay():
    """As Kata does it: the host makes a directory and a file, and the guest mounts on them at once."""
    host("mkdir k && echo one >k/bound")
    os.stat("k/bound")
    # The host's process makes them, says so, and waits for the guest.
    host(
        f"(for n in $(seq {mounts}); do mkdir k/d$n; : >k/f$n; echo $n >$work/meet/made.new; mv $work/meet/made.new $work/meet/made; "
        f"until [[ -e $work/meet/mounted$n ]]; do sleep 0.001; done; rm $work/meet/mounted$n; done) >/dev/null 2>&1 &"
    )
    deadline = time.monotonic() + LIMIT + mounts
    for turn in range(1, mounts + 1):
        while True:
            assert time.monotonic() < deadline, f"the host did not make {turn}"
            try:
                if read(f"{MEET}/made") == b"%d\n" % turn:
                    break
            except OSError:
                pass
        call("mount", b"tmpfs", f"k/d{turn}".encode(), b"tmpfs", 0, b"size=64k")
        call("mount", b"k/bound", f"k/f{turn}".encode(), None, 4096, None)
        write(f"{MEET}/mounted{turn}", b"")
    hears("k")
    mounted = {line.split()[4] for line in read("/proc/self/mountinfo").decode().splitlines()}
    gone = [name for turn in range(1, mounts + 1) for name in (f"d{turn}", f"f{turn}") if f"{S}/k/{name}" not in mounted]
    assert not gone, f"{len(gone)} mounts are gone: {gone[:10]}"
    for turn in range(1, mounts + 1):
        call("umount2", f"k/d{turn}".encode(), 0)
        call("umount2", f"k/f{turn}".encode(), 0)


def a_known_directory():
    """A program has looked up what the host has just made, and has mounted there. Those who watch hear of it nevertheless."""
    agent.send_signal(signal.SIGSTOP)
    watcher = oracle.Watcher(["d"])
    host("mkdir d/known && echo inside >d/known/file")
    directory = os.open("d/known", os.O_RDONLY)
    call("mount", b"tmpfs", b"d/known", b"tmpfs", 0, b"size=64k")
    agent.send_signal(signal.SIGCONT)
    host(f"touch d/{oracle.SENTINEL}-known")
    events = watcher.until(f"{oracle.SENTINEL}-known", wait)
    equal([event for event in events if event[3] == "known"], [("d", oracle.CREATE | oracle.ISDIR, 0, "known")])
    equal(os.readlink(f"/proc/self/fd/{directory}"), f"{S}/d/known")
    mounted = [line.split()[4] for line in read("/proc/self/mountinfo").decode().splitlines()]
    assert f"{S}/d/known" in mounted, mounted
    call("umount2", b"d/known", 0)
    equal((read("d/known/file"), "known" in os.listdir("d")), (b"inside\n", True))
    equal([name for name in os.listdir("d") if name.startswith(".")], [])
    for fd in (directory, watcher.fd):
        os.close(fd)


def names_are_swapped():
    """A process of the guest gives a name to a file, a symbolic link, a FIFO and a directory in turn. The agent changes none of them, and
    nothing that the link leads to."""
    host("mkdir w w/other && echo keep >w/target && echo here >w/file && ln -s target w/link && mkfifo w/fifo && touch -d 2001-01-01 w/target")
    target = "stat -c '%n %s %a %u %y %z %h' w/target w/other && cat w/target"
    before = host(target)
    kinds = ["file", "link", "fifo", "other"]

    def swap():
        for kind in kinds:
            os.rename(f"w/{kind}", "w/name")
            os.rename("w/name", f"w/{kind}")

    # It may have another name at this moment.
    beside(
        swap,
        "for n in 1 2 3 4 5; do touch w/file w/fifo; echo more >>w/file; chmod 640 w/file; done 2>/dev/null; touch w/new; mv w/new w/newer; rm w/newer",
    )
    is_alive()
    # Of the directory, only the change time: it was renamed.
    facts = lambda text: [line.split() for line in text.splitlines()]
    after = host(target)
    equal([line[:5] for line in facts(after)], [line[:5] for line in facts(before)])
    equal(facts(after)[0], facts(before)[0])
    equal(sorted(os.listdir("w")), ["fifo", "file", "link", "other", "target"])


def programs_start():
    """While the host writes to a program that the guest starts: nobody has it open for writing in the guest. This share has messages for
    opens, which take time."""
    mount("x")
    host("cp /bin/true ../x/true")
    os.stat("/mnt/x/true")

    def start():
        subprocess.run(["/mnt/x/true"], check=True)

    beside(
        start,
        "for n in 1 2 3 4 5; do touch ../x/true; chmod 755 ../x/true; dd if=/bin/true of=../x/true conv=notrunc status=none; done",
        rounds=2,
    )
    equal(hears("/mnt/x", "mkdir ../x/alive", "rmdir ../x/alive")[0], (oracle.CREATE | oracle.ISDIR, "alive"))
    umount("x")


def dirty_data_stays():
    """Stores to a mapping, while the host changes the file's attributes."""
    host("mkdir m && truncate -s 1M m/file")
    with mapped("m/file", 1 << 20, writable=True) as view:

        def store():
            number = int.from_bytes(view[0:8], "little") + 1
            for at in range(0, 512 << 10, 32 << 10):
                assert not number % 100 or int.from_bytes(view[at : at + 8], "little") == number - 1, f"a store to {at} is lost"
                view[at : at + 8] = number.to_bytes(8, "little")

        beside(store, "for n in 1 2 3 4 5; do chmod 640 m/file; touch -a m/file; chmod 644 m/file; done")
        last = int.from_bytes(view[0:8], "little")
        view.flush()
    equal(host("od -A n -t u8 -N 8 -j 491520 m/file").strip(), str(last))


def a_watch_outlives_a_name():
    """A file that has got another name is not gone with the first one."""
    DELETE_SELF = 0x400
    host("mkdir l && touch l/one")
    equal(os.stat("l/one").st_nlink, 1)
    watcher = oracle.Watcher(["l/one"], DELETE_SELF | oracle.ATTRIB)
    host("ln l/one l/two && rm l/one")
    seen("the name is gone", lambda: sorted(os.listdir("l")), ["two"])
    is_status(waiting=0)
    equal(os.stat("l/two").st_nlink, 1)
    ready, _, _ = select.select([watcher.fd], [], [], 0)
    equal([mask for _, mask, _, _ in watcher.now() if mask & DELETE_SELF] if ready else [], [])
    host("rm l/two")
    gone = False
    while not gone:
        wait(watcher.fd)
        gone = any(mask & DELETE_SELF for _, mask, _, _ in watcher.now())
    os.close(watcher.fd)


def until(watcher, directory, last):
    """Events up to the name `last` of one directory, (directory, mask, name)."""
    events = []
    while (directory, oracle.CREATE, last) not in events:
        wait(watcher.fd)
        events += [(directory, mask, name) for directory, mask, _, name in watcher.now()]
    return events


def old_times_are_not_written_back():
    """With a write-back cache the guest's kernel keeps a file's times, and writes them back when it repeats that a name goes."""
    mount("w")
    seen("the agent has found it", lambda: "w: changes by others are repeated" in read("/tmp/agent.log").decode(), True)
    host("cd ../w && mkdir from to && echo one >from/f && ln from/f from/g && touch -d 2001-01-01 from/f")
    os.chdir("/mnt/w")
    equal([(os.stat(name).st_nlink, read(name)) for name in ("from/f", "from/g")], [(2, b"one\n")] * 2)
    os.stat("to")
    host("cd ../w && echo two >>from/f && touch -d 2005-05-05 from/f && rm from/g && mv from/f to/f")
    seen("the guest is told", lambda: (os.listdir("from"), os.listdir("to"), status("w")["waiting"]), ([], ["f"], 0))
    equal(os.stat("to/f").st_nlink, 1)
    file = os.open("to/f", os.O_RDWR)
    # Neither is it the user who hears of what became of those times.
    os.fsync(file)
    os.close(file)
    os.sync()
    equal(*(host(command).split() for command in ("stat -c '%Y %s' ../w/to/f", "date -d 2005-05-05 '+%s 8'")))
    os.chdir(S)
    umount("w")


def below_an_overlay():
    """An overlay keeps the kernel's name of each file of its lower layer. It does not see that one is moved, only that it is gone."""
    host("mkdir o && echo one >o/f && echo two >o/g && echo three >o/h")
    for directory in ("/tmp/upper", "/tmp/merged"):
        os.mkdir(directory)
    call("mount", b"tmpfs", b"/tmp/upper", b"tmpfs", 0, b"size=64k")
    for directory in ("/tmp/upper/u", "/tmp/upper/w"):
        os.mkdir(directory)
    call("mount", b"overlay", b"/tmp/merged", b"overlay", 0, f"lowerdir={S}/o,upperdir=/tmp/upper/u,workdir=/tmp/upper/w".encode())
    merged = lambda name: read(f"/tmp/merged/{name}")
    moves = lambda: any(mask & oracle.MOVED_FROM for mask, _ in hears("d", "touch d/moves", "mv d/moves d/moved", "rm d/moved"))
    seen("moves are two changes", moves, False)
    equal([merged(name) for name in "fgh"], [b"one\n", b"two\n", b"three\n"])
    watcher = oracle.Watcher(["o"], oracle.CREATE | oracle.DELETE | oracle.MOVED_FROM | oracle.MOVED_TO)
    own = oracle.Watcher(["o/f"], oracle.ATTRIB | 0x400)
    host(f"mv o/f o/k && mv o/g o/h && touch o/{oracle.SENTINEL}-o")
    told = [(mask, name) for directory, mask, name in until(watcher, "o", f"{oracle.SENTINEL}-o")][:-1]
    equal(told, [(oracle.DELETE, "f"), (oracle.CREATE, "k"), (oracle.DELETE, "g"), (oracle.DELETE, "h"), (oracle.CREATE, "h")])
    is_status(waiting=0, failed=0)
    equal((read("o/k"), read("o/h"), sorted(os.listdir("o"))), (b"one\n", b"two\n", ["h", "k", f"{oracle.SENTINEL}-o"]))
    equal([os.stat(f"o/{name}").st_nlink for name in "kh"], [1, 1])
    # It is not gone.
    gone = [mask for _, mask, _, _ in own.now() if mask & 0x400] if select.select([own.fd], [], [], 0)[0] else []
    equal(gone, [])
    equal(merged("k"), b"one\n")
    for name in "fg":
        try:
            equal(merged(name), "no such file")
        except OSError as error:
            # What the overlay has of a name that is gone is ESTALE, with an agent and without.
            assert error.errno in (errno.ENOENT, errno.ESTALE), error
    for fd in (watcher.fd, own.fd):
        os.close(fd)
    for directory in (b"/tmp/merged", b"/tmp/upper"):
        call("umount2", directory, 0)
    seen("moves are moves", moves, True)


def a_tree_goes():
    """rm -r: each directory that is watched hears of what was in it."""
    host("mkdir -p t/x/y && touch t/x/y/file")
    watcher = oracle.Watcher(["t", "t/x", "t/x/y"])
    host(f"rm -r t/x && touch t/{oracle.SENTINEL}-t")
    gone = [event for event in until(watcher, "t", f"{oracle.SENTINEL}-t") if event[1] & oracle.DELETE]
    equal(gone, [("t/x/y", oracle.DELETE, "file"), ("t/x", oracle.DELETE | oracle.ISDIR, "y"), ("t", oracle.DELETE | oracle.ISDIR, "x")])
    os.close(watcher.fd)


def it_moves_to_where_nobody_has_been():
    """The agent has no directory there."""
    host("mkdir -p v/dir u/deep && touch v/file v/dir/inner")
    watcher = oracle.Watcher(["v"])
    for name in ["v/dir/inner", "v/file"]:
        os.stat(name)
    host(f"mv v/dir v/file u/deep/ && touch v/{oracle.SENTINEL}-v")
    moved = [event for event in until(watcher, "v", f"{oracle.SENTINEL}-v") if event[1] & oracle.MOVED_FROM]
    equal(moved, [("v", oracle.MOVED_FROM | oracle.ISDIR, "dir"), ("v", oracle.MOVED_FROM, "file")])
    # And back from there.
    host(f"touch w && mv u/deep/dir u/deep/file w v/ && touch v/{oracle.SENTINEL}-v2")
    came = [name for _, mask, name in until(watcher, "v", f"{oracle.SENTINEL}-v2") if mask & oracle.MOVED_TO]
    equal(came, ["dir", "file", "w"])
    equal((os.listdir("u/deep"), os.listdir("v/dir"), status()["failed"]), ([], ["inner"], 0))
    os.stat("v/dir/inner")
    os.close(watcher.fd)


def a_second_one():
    """Each change is repeated once, by one of two, and by the second if the first is killed."""
    global agent
    second = subprocess.Popen(["/host/thruway-guest"], stderr=open("/tmp/second.log", "wb", buffering=0))
    seen("a second agent's thread", lambda: status()["threads"] >= 2, True)
    made = [f"touch d/{letter}{turn}" for turn in range(10) for letter in "ab"]
    due = [(oracle.CREATE, command.split("/")[1]) for command in made]
    equal([event for event in hears("d", " && ".join(made)) if event[0] == oracle.CREATE], due)
    agent.kill()
    agent.wait()
    agent = second
    is_alive()


def killed():
    """What the host changes while there is no agent is seen when there is one again."""
    global agent
    host("mkdir g && echo old >g/file && echo gone >g/gone")
    equal(read("g/file"), b"old\n")
    equal(sorted(os.listdir("g")), ["file", "gone"])
    os.stat("g/gone")
    agent.kill()
    agent.wait()
    is_status(threads=0, on=False)
    host("echo newer >g/file && rm g/gone && echo new >g/new")
    agent = start_agent()
    is_status(on=True, waiting=0)
    equal(read("g/file"), b"newer\n")
    assert not os.path.exists("g/gone") and read("g/new") == b"new\n"
    is_alive()


def held_up():
    """A process holds a directory's lock: it lists the directory into a page that the stopped daemon of another share would have to
    fill. One of the agent's threads waits for the lock, and another goes on with other directories."""
    SYS_getdents64 = 217
    mount("x")
    host("mkdir h && touch h/old && head -c 4096 /dev/zero >../x/page")
    equal(os.listdir("h"), ["old"])
    page = os.open("/mnt/x/page", os.O_RDONLY)
    directory = os.open("h", os.O_RDONLY)
    watcher = oracle.Watcher(["h"], oracle.CREATE)
    host("kill -STOP $(family $(<$work/x.pid))")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with mmap.mmap(page, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as buffer:
            os._exit(libc.syscall(SYS_getdents64, directory, ctypes.c_void_p(address(buffer)), 4096) <= 0)
    waits = lambda: read(f"/proc/{pid}/stat").decode().rpartition(")")[2].split()[0]
    try:
        seen("a process holds the lock", waits, "D")
        host("touch h/new")
        is_alive()
        is_status(on=False)
        assert status()["waiting"] > 0, "nothing waits for the lock"
    finally:
        host("kill -CONT $(family $(<$work/x.pid))")
    equal(os.waitpid(pid, 0)[1], 0)
    wait(watcher.fd)
    equal(watcher.now()[0][3], "new")
    is_status(on=True, waiting=0)
    for fd in (page, directory, watcher.fd):
        os.close(fd)
    umount("x")


def stopped():
    """An agent that does nothing gives the guest nothing to keep, and goes on where it was."""
    is_status(on=True, waiting=0)
    agent.send_signal(signal.SIGSTOP)
    watcher = oracle.Watcher(["d"])
    host("touch d/while-stopped")
    is_status(on=False)
    agent.send_signal(signal.SIGCONT)
    is_status(on=True, waiting=0)
    host(f"touch d/{oracle.SENTINEL}-cont")
    events = watcher.until(f"{oracle.SENTINEL}-cont", wait)
    assert ("d", oracle.CREATE, 0, "while-stopped") in events, events


def starved():
    """Beside processes that take all of the CPU."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(3)]
    os.setpriority(os.PRIO_PROCESS, agent.pid, 19)
    for thread in os.listdir(f"/proc/{agent.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)
    made = [f"touch d/starved{turn}" for turn in range(20)]
    got = [event for event in hears("d", " && ".join(made)) if event[0] == oracle.CREATE]
    for loop in loops:
        loop.kill()
        loop.wait()
    equal(got, [(oracle.CREATE, command.split("/")[1]) for command in made])


class Elsewhere:
    """A process that has a part of a share in its own mount namespace only, and its own pid namespace if `pids`."""

    def __init__(self, tag, part, pids=False):
        self.ends, self.theirs = os.pipe()
        self.mine, self.goes = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                # CLONE_NEWNS, CLONE_NEWPID
                call("unshare", 0x20000 | 0x20000000 * pids)
                if pids and (inner := os.fork()):
                    os._exit(os.waitpid(inner, 0)[1])
                call("mount", None, b"/", None, 0x44000, None)
                os.makedirs("/tmp/elsewhere", exist_ok=True)
                os.makedirs("/tmp/whole", exist_ok=True)
                call("mount", tag.encode(), b"/tmp/whole", b"virtiofs", 0, None)
                call("mount", f"/tmp/whole/{part}".encode(), b"/tmp/elsewhere", None, 4096, None)
                call("umount2", b"/tmp/whole", 0)
                os.chdir("/tmp/elsewhere")
                watcher = oracle.Watcher(["watched"])
                os.write(self.theirs, b"ready")
                events = watcher.until("sentinel", wait)
                os.write(self.theirs, json.dumps(events).encode())
                status = 0
            except BaseException as error:
                os.write(self.theirs, f"{type(error).__name__}: {error}".encode())
            os._exit(status)

    def told(self):
        wait(self.ends)
        return os.read(self.ends, 65536).decode()


def agents_mounts():
    """Where the agent has something open. A share that it has open stays the same one when it is mounted again, with the pid namespace
    of its first mounter."""
    found = set()
    for fd in os.listdir(f"/proc/{agent.pid}/fdinfo"):
        try:
            found |= {line for line in read(f"/proc/{agent.pid}/fdinfo/{fd}").decode().splitlines() if line.startswith("mnt_id")}
        except FileNotFoundError:
            # It was closed just now.
            pass
    return found


def in_another_namespace():
    """The agent finds shares that only another mount namespace has, in part."""
    before = agents_mounts()
    host("mkdir -p $work/y/part/watched")
    elsewhere = Elsewhere("y", "part")
    equal(elsewhere.told(), "ready")
    # It looks twice a minute.
    seen("the agent has found it", lambda: "y: changes by others are repeated" in read("/tmp/agent.log").decode(), True)
    host("touch $work/y/part/watched/new && touch $work/y/part/watched/sentinel")
    equal(json.loads(elsewhere.told())[0], ["watched", oracle.CREATE, 0, "new"])
    equal(os.waitpid(elsewhere.pid, 0)[1], 0)
    seen("the agent has let go of it", lambda: agents_mounts() <= before, True, limit=300)


def children_of_agent():
    """The processes that it has, or None if a thread of it ended meanwhile: its children are another thread's then."""
    try:
        return [child for task in os.listdir(f"/proc/{agent.pid}/task") for child in read(f"/proc/{agent.pid}/task/{task}/children").split()]
    except (FileNotFoundError, ProcessLookupError):
        return None


def in_another_pid_namespace():
    """The daemon knows threads by the numbers that they have in the mounter's pid namespace. The agent has a process there as long as the
    share is mounted."""
    said = lambda: read("/tmp/agent.log").decode().count("y: changes by others are repeated")
    before = said()
    host("mkdir -p $work/y/part/watched")
    elsewhere = Elsewhere("y", "part", pids=True)
    equal(elsewhere.told(), "ready")
    # It looks twice a minute.
    seen("the agent has found it", said, before + 1, limit=300)
    host("cd $work/y/part/watched && rm -f sentinel && touch newer && touch sentinel")
    events = json.loads(elsewhere.told())
    assert ["watched", oracle.CREATE, 0, "newer"] in events, events
    equal(os.waitpid(elsewhere.pid, 0)[1], 0)
    assert "pid namespace" not in read("/tmp/agent.log").decode()
    seen("no process is left", children_of_agent, [])


def submounts():
    """Of another file system below the share nothing is told. The agent leaves it alone, and what is around it has its events."""
    mount("ro")
    equal(read("/mnt/ro/around/below/file"), b"there\n")
    assert os.stat("/mnt/ro/around/below").st_dev != os.stat("/mnt/ro/around").st_dev, "the submount is not announced"
    log = lambda: read("/tmp/agent.log").decode()
    seen("what the agent says", lambda: "/mnt/ro/around/below: a submount, whose changes are not told" in log(), True)
    equal(hears("/mnt/ro/around", "mkdir ../ro/around/new"), [(oracle.CREATE | oracle.ISDIR, "new")])
    host("echo elsewhere >$work/ro/around/below/file")
    seen("its contents, as without an agent", lambda: read("/mnt/ro/around/below/file"), b"elsewhere\n")
    umount("ro")


def many_shares():
    """Each has events, and the agent stays small."""
    watchers = []
    for share in range(shares):
        mount(f"m{share}")
        watchers.append(oracle.Watcher([f"/mnt/m{share}"]))
    log = lambda: read("/tmp/agent.log").decode()
    seen("the agent has found all", lambda: all(f"m{share}: changes by others" in log() for share in range(shares)), True)
    host(f"for n in $(seq 0 {shares - 1}); do touch $work/m$n/file $work/m$n/sentinel; done")
    for share, watcher in enumerate(watchers):
        names = [name for _, mask, _, name in watcher.until("sentinel", wait) if mask == oracle.CREATE]
        equal(names, ["file"])
        os.close(watcher.fd)
    # A second thread goes when it has waited for nothing. The main thread, and those of s, x, y and ro may be there besides.
    seen("one thread for each", lambda: len(os.listdir(f"/proc/{agent.pid}/task")) <= shares + 5, True)
    memory = [int(line.split()[1]) for line in read(f"/proc/{agent.pid}/status").decode().splitlines() if line.startswith("VmRSS")][0]
    assert memory <= 2048 + 48 * shares, f"the agent has {memory} KiB"
    print(f"ok {memory} KiB of memory with {shares + 1} shares", flush=True)
    for share in range(shares):
        umount(f"m{share}")


def many_changes():
    """None is lost and none invented, and the guest is right when the last event has come."""
    write("/proc/sys/fs/inotify/max_queued_events", b"100000", flags=os.O_WRONLY)
    host("mkdir many")
    equal(os.listdir("many"), [])
    watcher = oracle.Watcher(["many"], oracle.CREATE | oracle.DELETE | oracle.MOVED_FROM | oracle.MOVED_TO)
    host(f"cd many && seq {MANY} | xargs touch && touch {oracle.SENTINEL}-many")
    start = time.monotonic()
    events = watcher.until(f"{oracle.SENTINEL}-many", wait)
    took = time.monotonic() - start
    equal([(mask, name) for _, mask, _, name in events], [(oracle.CREATE, str(n)) for n in range(1, MANY + 1)])
    os.close(watcher.fd)
    equal(len(os.listdir("many")), MANY + 1)
    print(f"ok {MANY} files, the last event {took:.1f} s after the last", flush=True)


def many_that_nobody_watches():
    """The kernel only looks at them: one message for each new file."""
    host("mkdir quiet quiet/in quiet/links && touch quiet/in/old && for n in 1 2 3 4 5 6 7 8; do touch quiet/links/a$n; ln quiet/links/a$n quiet/links/b$n; done")
    equal(os.listdir("quiet/in"), ["old"])
    pairs = range(1, 9)
    equal([os.stat(f"quiet/links/{name}{n}").st_nlink for n in pairs for name in "ab"], [2] * 16)
    assert not os.path.exists("quiet/in/7")
    asked = lambda: host_number("requests s CREATE MKNOD OPEN")
    before = asked()
    # Of two names of a file, one goes or is another.
    links = "(cd ../links; rm a1 b2 a3 b4; mv a5 c5; mv b6 c6; mv a7 b5; mv b8 a6)"
    # The agent gets what comes in small pieces as it comes, and the rest at once.
    agent.send_signal(signal.SIGSTOP)
    host(f"cd quiet/in && echo more >>old; seq 500 | xargs touch; {links}; seq 501 1000 | xargs touch")
    agent.send_signal(signal.SIGCONT)
    seen("a name", lambda: os.path.exists("quiet/in/7"), True)
    is_status(on=True, waiting=0)
    equal((len(os.listdir("quiet/in")), read("quiet/in/old")), (1001, b"more\n"))
    left = [f"{name}{n}" for n in pairs for name in "abc" if os.path.exists(f"quiet/links/{name}{n}")]
    equal(left, ["b1", "a2", "b3", "a4", "b5", "c5", "a6", "c6", "b7", "a8"])
    # Some for each batch, which has 50 changes or more.
    assert asked() - before < 300, f"{asked() - before} messages make files"


def by_a_daemon_that_only_reads():
    """With --readonly, and a share that is mounted rw."""
    mount("ro")
    seen("the agent has found it", lambda: "ro: changes by others are repeated" in read("/tmp/agent.log").decode(), True)
    refused(30, os.mkdir, "/mnt/ro/mine")
    equal(hears("/mnt/ro", "mkdir ../ro/theirs"), [(oracle.CREATE | oracle.ISDIR, "theirs")])
    umount("ro")


def mounted_read_only():
    """It says what to do, and begins when the share is mounted anew."""
    os.makedirs("/mnt/x", exist_ok=True)
    call("mount", b"x", b"/mnt/x", b"virtiofs", 1, None)
    seen("what to do", lambda: "x: it is mounted read-only" in read("/tmp/agent.log").decode(), True)
    call("umount2", b"/mnt/x", 0)


def at_once():
    """SIGTERM ends it, and nothing keeps the share mounted."""
    agent.terminate()
    equal(agent.wait(LIMIT), 0)
    os.chdir("/")
    umount("s")


def main():
    global agent
    mount("s")
    mount("meet")
    agent = start_agent()
    os.chdir(S)
    host("mkdir d")
    steps(
        (mounts_stay,),
        (a_known_directory,),
        (many_changes,),
        (many_that_nobody_watches,),
        (by_a_daemon_that_only_reads,),
        (names_are_swapped,),
        (programs_start,),
        (dirty_data_stays,),
        (a_watch_outlives_a_name,),
        (old_times_are_not_written_back,),
        (below_an_overlay,),
        (a_tree_goes,),
        (it_moves_to_where_nobody_has_been,),
        (mounted_read_only,),
        (submounts,),
        (in_another_namespace,),
        (in_another_pid_namespace,),
        (many_shares,),
        (held_up,),
        (stopped,),
        (killed,),
        (starved,),
        (a_second_one,),
        (at_once,),
    )


main()
