#!/usr/bin/python3
"""What a guest with leases keeps, how many messages that takes, and how it ends: leases.py DIRECTORIES FILES, the size of the
tree."""

import json
import os
import random
import sys
import time

sys.path.insert(0, "/host")
from meet import *
from window import *

# 30 s: many times what a notification takes, also on a busy machine.
PATIENCE = 30
LOOKS = "Lookup Getattr Open Opendir Read Readdir Readdirplus Flush Release Releasedir Statx".split()
CHANGES = "Create Write Setattr Unlink Mkdir Rmdir Forget BatchForget".split()


def requests(opcodes):
    return {opcode: host_number(f"requests s {opcode}") for opcode in opcodes}


def cost(function, opcodes=LOOKS):
    """Runs the function, and returns the requests that it took."""
    before = requests(opcodes)
    function()
    return {opcode: count - before[opcode] for opcode, count in requests(opcodes).items() if count != before[opcode]}


def comes(what, function, due):
    """Waits until the guest has been notified."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            got = function()
        except OSError as error:
            got = error.errno
        if got == due:
            return
        assert time.monotonic() < deadline, f"{what}: {str(got)[:100]}, expected {str(due)[:100]}"
        time.sleep(0.002)


def settled(function):
    """The guest keeps everything after the function ran once or twice. The lease's time may end at any moment, so again."""
    for _ in range(5):
        function()
        found = cost(function)
        if not found:
            return
    raise AssertionError(f"this takes messages each time: {found}")


def walk(top):
    for directory, _, names in os.walk(top):
        for name in names:
            os.stat(f"{directory}/{name}")
            read(f"{directory}/{name}")


def no_message():
    """A tree that was read once is read again without a message."""
    many, files = sys.argv[1:]
    host(f"mkdir tree && cd tree && for d in $(seq {many}); do mkdir $d; for f in $(seq {files}); do echo $d $f >$d/$f; done; done")
    walk(f"{S}/tree")
    settled(lambda: walk(f"{S}/tree"))
    equal(read(f"{S}/tree/7/9"), b"7 9\n")

    def missing():
        refused(errno.ENOENT, os.stat, f"{S}/tree/none")

    settled(missing)
    host("echo here >tree/none")
    comes("a name once missing", lambda: read(f"{S}/tree/none"), b"here\n")


def git(*arguments):
    options = "-c", "safe.directory=*", "-c", "user.name=t", "-c", "user.email=t@t"
    done = subprocess.run(["git", *options, "-C", f"{S}/repo", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"git {arguments}: {done.stderr}"
    return done.stdout


def git_status():
    """The second git status takes no message."""
    host("cp -a tree repo")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    settled(lambda: equal(git("--no-optional-locks", "status", "--porcelain"), ""))
    host("echo changed >repo/3/4")
    comes("git status", lambda: git("--no-optional-locks", "status", "--porcelain"), " M 3/4\n")


def host_changes():
    """Each change of the host ends what it makes untrue."""
    d = f"{S}/changes"
    host("mkdir changes && echo one >changes/f && ln changes/f changes/hard && mkdir changes/sub")
    settled(lambda: walk(d))
    host("echo two >changes/f")
    comes("contents", lambda: read(f"{d}/f"), b"two\n")
    comes("contents by another link", lambda: read(f"{d}/hard"), b"two\n")
    host("chmod 600 changes/f")
    comes("mode", lambda: os.stat(f"{d}/f").st_mode & 0o777, 0o600)
    os.listdir(d)
    host("echo x >changes/new")
    comes("listing", lambda: sorted(os.listdir(d)), ["f", "hard", "new", "sub"])
    read(f"{d}/new")
    host("mv changes/new changes/sub/new")
    comes("a rename", lambda: os.listdir(f"{d}/sub"), ["new"])
    comes("its old name", lambda: os.path.exists(f"{d}/new"), False)
    host("echo replaced >changes/g && mv changes/g changes/f")
    comes("a replacement", lambda: read(f"{d}/f"), b"replaced\n")
    host("rm changes/f")
    comes("a removal", lambda: os.path.exists(f"{d}/f"), False)


def opens():
    """Files that are open without a message."""
    d = f"{S}/opens"
    host("mkdir opens && head -c 20000 /dev/urandom >opens/f && cp opens/f opens/g && cp /bin/true opens/prog")
    data = read(f"{d}/f")
    settled(lambda: read(f"{d}/f"))
    fd = os.open(f"{d}/f", os.O_RDONLY)
    os.rename(f"{d}/f", f"{d}/renamed")
    equal(os.pread(fd, 20000, 0), data)
    os.link(f"{d}/renamed", f"{d}/linked")
    os.unlink(f"{d}/renamed")
    equal(os.fstat(fd).st_nlink, 1)
    os.unlink(f"{d}/linked")
    drop_caches()
    equal(os.pread(fd, 20000, 0), data)
    equal(os.fstat(fd).st_nlink, 0)
    os.close(fd)
    # Mapped, and truncated by another open.
    settled(lambda: read(f"{d}/g"))
    with mapped(f"{d}/g", 20000) as view:
        equal(view[:], data)
        os.close(os.open(f"{d}/g", os.O_WRONLY | os.O_TRUNC))
        write(f"{d}/g", b"short")
        equal(view[:5], b"short")
    equal(read(f"{d}/g"), b"short")
    os.close(os.open(f"{d}/g", os.O_RDONLY | os.O_TRUNC))
    equal(read(f"{d}/g"), b"")
    # A program, twice, and again after its replacement.
    for _ in range(2):
        equal(subprocess.run([f"{d}/prog"]).returncode, 0)
    host("cp /bin/false opens/new && mv opens/new opens/prog")
    comes("another program", lambda: subprocess.run([f"{d}/prog"]).returncode, 1)
    # A directory that is open and left.
    os.chdir(d)
    dfd = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    equal(sorted(os.listdir(dfd)), ["g", "prog"])
    os.mkdir(f"{d}/gone")
    os.chdir(f"{d}/gone")
    equal(os.listdir("."), [])
    os.rmdir(f"{d}/gone")
    refused(errno.ENOENT, os.open, "x", os.O_CREAT | os.O_WRONLY)
    os.chdir("/")
    equal(sorted(os.listdir(dfd)), ["g", "prog"])
    os.close(dfd)


def created():
    """A file that the guest makes takes no message to close, and none to read again."""
    d = f"{S}/created"
    host("mkdir created")
    os.listdir(d)
    new = iter(range(1000))

    def make(flags, data, mode=0o600):
        name = f"{d}/{next(new)}"
        fd = os.open(name, flags | os.O_CREAT, mode)
        os.write(fd, data)
        os.close(fd)
        return name

    # The first may look at the directory. A lease may end at any moment, so again.
    for flags in os.O_WRONLY | os.O_EXCL, os.O_RDWR | os.O_EXCL:
        for _ in range(5):
            due = {"Create": 10, "Write": 10}
            found = cost(lambda: [make(flags, b"data") for _ in range(10)], [*LOOKS, "Create", "Write"])
            if found == due:
                break
        equal(found, due)
    # A whole page and a part of one. The part grows.
    data = pattern(5000)
    name = make(os.O_RDWR | os.O_EXCL, data)
    settled(lambda: equal(read(name), data))

    def grow():
        nonlocal data
        with open(name, "ab") as file:
            file.write(b"more")
        data += b"more"
        equal(read(name), data)

    for _ in range(5):
        # Its OPEN, and what Python asks when it opens a file.
        found = cost(grow)
        if set(found) <= {"Open", "Getattr"}:
            break
    assert set(found) <= {"Open", "Getattr"}, found
    host(f"echo host >>created/{os.path.basename(name)}")
    comes("what the host has added", lambda: read(name), data + b"host\n")
    # Its mode forbids what its creator does.
    name = f"{d}/readonly"
    with open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o444), "r+b", buffering=0) as file:
        file.write(b"data")
        # The spare descriptor of the daemon is closed after two seconds.
        time.sleep(3)
        file.write(b"more")
        os.unlink(name)
        drop_caches()
        equal((os.pread(file.fileno(), 9, 0), os.fstat(file.fileno()).st_nlink), (b"datamore", 0))
        time.sleep(3)
        file.write(b"last")
        equal(os.pread(file.fileno(), 20, 0), b"datamorelast")
        file.truncate(4)
        drop_caches()
        equal(os.pread(file.fileno(), 20, 0), b"data")
    # The host can execute what the guest has just written.
    for mode in 0o755, 0o600:
        name = make(os.O_WRONLY | os.O_EXCL, b"#!/bin/bash\necho it runs\n", mode)
        os.chmod(name, 0o755)
        equal(host(f"./created/{os.path.basename(name)}").strip(), "it runs")
    # A name that is there is not made, whether the guest knows it or not.
    host("touch created/there")
    for _ in range(2):
        refused(errno.EEXIST, os.open, f"{d}/there", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        refused(errno.EEXIST, os.mkdir, f"{d}/there")
        os.stat(f"{d}/there")


def built():
    """Building a C project takes a fourth of virtiofsd's 5,791 messages, and no RELEASE of what was created."""
    os.mkdir(f"{S}/build")

    def build():
        done = subprocess.run([sys.executable, "/host/build.py", f"{S}/build"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    found = cost(build, LOOKS + CHANGES)
    print(f"the build takes {sum(found.values())} messages: {found}", flush=True)
    assert sum(found.values()) <= 1450, found
    # 70 files are created, and most of them read again.
    for opcode in "Release", "Flush", "Read":
        assert found.get(opcode, 0) <= 40, found


def own_changes():
    """The guest sees its own changes at once."""
    d = f"{S}/own"
    host("mkdir -p own/a own/b && echo 1 >own/a/f")
    settled(lambda: walk(d))
    for turn in range(50):
        write(f"{d}/a/f", b"%d" % turn)
        equal((read(f"{d}/a/f"), os.stat(f"{d}/a/f").st_size), (b"%d" % turn, len(str(turn))))
        os.rename(f"{d}/a/f", f"{d}/b/f")
        equal((os.listdir(f"{d}/a"), os.listdir(f"{d}/b"), read(f"{d}/b/f")), ([], ["f"], b"%d" % turn))
        os.rename(f"{d}/b/f", f"{d}/a/f")
        os.link(f"{d}/a/f", f"{d}/b/l")
        equal(os.stat(f"{d}/a/f").st_nlink, 2)
        os.unlink(f"{d}/b/l")
        equal(os.stat(f"{d}/a/f").st_nlink, 1)
    # The new directory may not have been watched.
    os.rename(f"{d}/a/f", f"{d}/b/f")
    read(f"{d}/b/f")
    host("echo host >own/b/f")
    comes("a change after the guest's rename", lambda: read(f"{d}/b/f"), b"host\n")


def many_changes():
    """Files change while the guest looks. In the end it sees what the host has."""
    host("mkdir many ../done && for f in $(seq 100); do echo 0 >many/$f; done")
    rng, d, turns = random.Random(5), f"{S}/many", 20
    for turn in range(turns):
        change = "echo TURN $i >many/$f; mv many/$f many/xTURN; mv many/xTURN many/$f"
        host(f"(for i in $(seq 50); do f=$((RANDOM % 100 + 1)); {change}; done; touch ../done/TURN) >/dev/null 2>&1 &".replace("TURN", str(turn)))
        for _ in range(300):
            try:
                read(f"{d}/{rng.randrange(1, 101)}")
            except FileNotFoundError:
                pass
    host(f"until [[ $(ls ../done | wc -l) == {turns} ]]; do sleep 0.05; done")
    due = dict(line.split(":", 1) for line in host("cd many && grep -H . *").splitlines())
    comes("all contents", lambda: {name: read(f"{d}/{name}").decode().strip() for name in os.listdir(d)}, due)


def control_socket():
    """The daemon's control socket knows this guest."""
    write(f"{S}/open", b"x")
    equal(read(f"{S}/open"), b"x")
    status = json.loads(host("control s status"))
    equal([status[name]["on"] for name in ("watch", "notifications", "dax", "passthrough")], [True, True, False, False])
    assert status["dax"]["why"] and status["watch"]["marks"] > 0, status
    assert {"LEASES", "DO_READDIRPLUS"} <= set(status["guest"]["flags"]), status["guest"]
    roles = [queue["role"] for queue in status["frontend"]["queues"] if queue["running"]]
    equal(roles[:3], ["hiprio", "notification", "request"])
    assert status["options"]["cache"] == "auto" and status["migration"]["state"] == "none", status
    paths = [inode["path"] for inode in json.loads(host("control s 'inodes?top=1000'"))["inodes"]]
    assert {"/", "/open"} <= set(paths), paths
    metrics = host("control s metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert 'thruway_request_seconds_bucket{le="+Inf",opcode="Lookup"}' in values, metrics
    for name in "thruway_watch_marks", "thruway_watch_nodes", "thruway_descriptors":
        assert float(values[name]) > 0, f"{name}: {values[name]}"
    # A drain does no more to a guest than to make it wait.
    host("curl --silent --show-error --fail --unix-socket ../sockets/s.control -X POST 'http://daemon/drain?hold=0.2'")
    write(f"{S}/open", b"y")
    equal(host("cat open"), "y")
    os.unlink(f"{S}/open")


mount("meet")
mount("s")
steps((control_socket,), (no_message,), (git_status,), (host_changes,), (opens,), (created,), (built,), (own_changes,), (many_changes,))
umount("s")
umount("meet")
