#!/usr/bin/python3
"""What a guest sees, and when, after changes by itself, by another guest and by the host: caching.py a|b MODE.

docs/caching.md has the promises. Guest a looks. Guest b runs the commands that a sends.
"""

import os
import stat
import subprocess
import sys
import time
from errno import EACCES, ENOENT

sys.path.insert(0, "/host")
from meet import *
from window import *

role, mode = sys.argv[1:3]

# At the next look; within PATIENCE; not before the guest has forgotten the file; when the agent has repeated the change. All timeouts are an
# hour or a day then, so that nothing else can end what the guest knows.
NOW, SOON, LATE, TOLD = "at once", "soon", "not before the guest forgets", "when the guest is told"
NEVER = dict.fromkeys(("created", "listed", "removed", "replaced", "mode", "opened again", "read again", "grown"), NOW)
# Names and attributes are believed for 1 s, and the size limits what is read.
AUTO = NEVER | dict.fromkeys(("removed", "replaced", "mode", "read again", "grown"), SOON)
METADATA = NEVER | dict.fromkeys(("listed", "removed", "replaced", "mode"), LATE)
PROMISES = {
    "never": NEVER,
    "auto": AUTO,
    "metadata": METADATA,
    "always": METADATA | dict.fromkeys(("opened again", "read again", "grown"), LATE),
    # The guest believes its own size.
    "writeback": AUTO | dict.fromkeys(("read again", "grown"), LATE),
    # Without an OPEN or OPENDIR the guest goes by the attributes that it knows.
    "no-open": AUTO | dict.fromkeys(("listed", "opened again"), SOON),
    # The guest believes for a day that a name does not exist.
    "negative": AUTO | {"created": LATE},
    # A guest with the guest agent.
    "agent": dict.fromkeys(NEVER, TOLD),
    # There the guest's kernel keeps size, times and contents of what it knows.
    "agent-writeback": dict.fromkeys(NEVER, TOLD) | {"opened again": NOW, "read again": LATE, "grown": LATE},
}
LOOKS = "LOOKUP GETATTR OPEN OPENDIR READ READDIR READDIRPLUS READLINK FLUSH RELEASE RELEASEDIR STATX ACCESS GETXATTR"
sent = 0


def guest_b(command):
    """Runs a shell command in guest b, in the share's directory."""
    global sent
    sent += 1
    write(f"{MEET}/sending", command.encode())
    os.rename(f"{MEET}/sending", f"{MEET}/{sent}.for-b")
    await_file(f"{MEET}/{sent}.done")


def await_file(path, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def obey():
    """Guest b."""
    for number in range(1, 1_000_000):
        # Guest a may have to wait for what it is to see.
        await_file(f"{MEET}/{number}.for-b", 2 * PATIENCE)
        command = read(f"{MEET}/{number}.for-b").decode()
        if command != "end":
            subprocess.run(["sh", "-ec", command], cwd=S, check=True)
        write(f"{MEET}/{number}.done", b"")
        if command == "end":
            return


def result(look):
    try:
        return look()
    except OSError as error:
        return error.errno


def messages():
    return host_number(f"requests s@a {LOOKS}")


def keep(look, old):
    """The guest looks until that takes no message. What the host has just changed may not be leased at once."""
    deadline = time.monotonic() + PATIENCE
    while True:
        before = messages()
        equal(result(look), old)
        if messages() == before:
            return
        assert time.monotonic() < deadline, "each look takes a message"


def seen(what, look, old, new, when):
    """Checks that a change from `old` to `new`, which has been made, is seen when it was promised."""
    if when not in (SOON, TOLD):
        equal(result(look), new if when == NOW else old)
    deadline = time.monotonic() + PATIENCE
    while (got := result(look)) != new:
        assert time.monotonic() < deadline, f"{what}: {got!r}, expected {new!r}"
        if when == LATE:
            os.sync()
            # The kernel spares what was used since the last time.
            for _ in range(3):
                drop_caches()
        time.sleep(0.01)
    print(f"ok {what} is seen {when}", flush=True)


def by(name, change):
    """What the guest sees after changes that another makes by `change`, which runs a shell command."""
    promised = PROMISES[mode]
    base = f"{S}/{name}"
    change(f"mkdir {name}; for f in open again grown mode gone new; do echo old >{name}/$f; done")
    os.listdir(base)
    for file in os.listdir(base):
        os.stat(f"{base}/{file}")

    def step(what, command, look, old, new):
        # Some contents are kept only from the second open on.
        for _ in range(3):
            equal(result(look), old)
        # Before Linux refuses something it asks for the attributes again.
        if mode == "agent" and old != EACCES:
            keep(look, old)
        change(f"cd {name}; {command}")
        seen(f"{name}: {what}", look, old, new, promised.get(what, TOLD))

    step("created", "echo x >late", lambda: os.stat(f"{base}/late").st_size, ENOENT, 2)
    change(f"mkdir {name}/list; touch {name}/list/one")
    step("listed", "touch list/two", lambda: sorted(os.listdir(f"{base}/list")), ["one"], ["one", "two"])
    step("removed", "rm gone", lambda: os.stat(f"{base}/gone").st_size, 4, ENOENT)
    step("replaced", "echo fresh >n; mv n new", lambda: os.stat(f"{base}/new").st_size, 4, 6)
    look = lambda: stat.S_IMODE(os.stat(f"{base}/mode").st_mode)
    step("mode", "chmod 600 mode", look, 0o644, 0o600)
    step("opened again", "echo new >again.new; cat again.new >again", lambda: read(f"{base}/again"), b"old\n", b"new\n")
    fd = os.open(f"{base}/open", os.O_RDONLY)
    step("read again", "echo new >open", lambda: os.pread(fd, 100, 0), b"old\n", b"new\n")
    os.close(fd)
    step("grown", "echo more >>grown", lambda: read(f"{base}/grown"), b"old\n", b"old\nmore\n")
    if mode == "agent":
        more_by(name, change, base, step)


def as_user(look):
    """What another user than root sees."""
    os.seteuid(1000)
    try:
        return look()
    finally:
        os.seteuid(0)


def more_by(name, change, base, step):
    """What has no promise of its own in the other modes."""
    files = "for f in own times short long hard; do echo old >$f; done; ln hard sub/hard"
    change(f"cd {name}; ln -s old link; echo x >closed; mkdir dir sub; echo in >dir/f; {files}")
    link = lambda: os.readlink(f"{base}/link")
    step("another symbolic link", "ln -s new l; mv -T l link", link, "old", "new")
    step("a symbolic link removed", "rm link", link, "new", ENOENT)
    closed = lambda: as_user(lambda: read(f"{base}/closed"))
    step("permissions taken", "chmod 600 closed", closed, b"x\n", EACCES)
    step("permissions given", "chmod 644 closed", closed, EACCES, b"x\n")
    inner = lambda: as_user(lambda: read(f"{base}/dir/f"))
    step("a closed directory", "chmod 700 dir", inner, b"in\n", EACCES)
    step("an open directory", "chmod 755 dir", inner, EACCES, b"in\n")
    owner = lambda: (os.stat(f"{base}/own").st_uid, os.stat(f"{base}/own").st_gid)
    step("owner", "chown 7:8 own", owner, (0, 0), (7, 8))
    step("times", "touch -d @1000000000 times", lambda: os.stat(f"{base}/times").st_mtime < 1.1e9, False, True)
    short = lambda: (os.stat(f"{base}/short").st_size, read(f"{base}/short"))
    step("truncated", "truncate -s 1 short", short, (4, b"old\n"), (1, b"o"))
    step("a hole at the end", "truncate -s 3 short", short, (1, b"o"), (3, b"o\0\0"))
    step("by another link", "echo by >hard.new; cat hard.new >sub/hard", lambda: read(f"{base}/hard"), b"old\n", b"by\n")
    step("links", "ln hard hard2", lambda: os.stat(f"{base}/hard").st_nlink, 2, 3)
    step("a name back", "mv dir/f dir/g", inner, b"in\n", ENOENT)
    both = lambda: [result(lambda: os.listdir(f"{base}/{directory}")) for directory in ("dir", "moved")]
    step("a directory renamed", "mv dir moved", both, [["g"], ENOENT], [ENOENT, ["g"]])
    step("removed in a listing", "rm moved/g", lambda: os.listdir(f"{base}/moved"), ["g"], [])
    step("replaced by a directory", "rm long; mkdir long", lambda: os.path.isdir(f"{base}/long"), False, True)
    with mapped(f"{base}/open", 4) as view:
        # Not shorter for a moment: the guest's process would get a SIGBUS.
        step("mapped", "echo map | dd of=open conv=notrunc", lambda: view[:], b"new\n", b"map\n")


def by_the_host():
    by("host", host)


def by_another_guest():
    by("guest", guest_b)


def by_itself():
    """Its own changes, which the host sees too."""
    base, at = f"{S}/own", lambda command: host(command).strip()
    refused(ENOENT, os.stat, base)
    os.mkdir(base)
    f = f"{base}/file"
    refused(ENOENT, os.stat, f)
    write(f, b"one")
    equal((os.listdir(base), read(f), os.stat(f).st_size), (["file"], b"one", 3))
    # A close sends what --writeback has collected.
    equal(at("cat own/file"), "one")
    fd = os.open(f, os.O_RDWR)
    os.pwrite(fd, b"two", 0)
    equal((read(f), os.pread(fd, 10, 0)), (b"two", b"two"))
    if mode != "writeback":
        equal(at("cat own/file"), "two")
    os.pwrite(fd, b"longer", 0)
    os.fsync(fd)
    equal((read(f), os.stat(f).st_size, at("cat own/file")), (b"longer", 6, "longer"))
    os.close(fd)
    os.chmod(f, 0o600)
    equal((stat.S_IMODE(os.stat(f).st_mode), at("stat -c %a own/file")), (0o600, "600"))
    os.truncate(f, 2)
    equal((read(f), os.stat(f).st_size, at("cat own/file")), (b"lo", 2, "lo"))
    os.rename(f, f"{base}/other")
    refused(ENOENT, os.stat, f)
    equal((os.listdir(base), read(f"{base}/other"), at("ls own")), (["other"], b"lo", "other"))
    write(f"{base}/new", b"new")
    os.rename(f"{base}/new", f"{base}/other")
    equal((os.listdir(base), read(f"{base}/other")), (["other"], b"new"))
    os.unlink(f"{base}/other")
    refused(ENOENT, os.stat, f"{base}/other")
    equal((os.listdir(base), at("ls own")), ([], ""))


def kept():
    """An unchanged file that is opened again takes no READ, on a file system whose times tell."""
    kind = host("stat -f -c %T .").strip()
    if kind not in ("ext2/ext3", "xfs", "btrfs"):
        print(f"note: nothing is kept on {kind}", flush=True)
        return
    write(f"{S}/kept", b"data")
    reads = lambda: host_number("requests s@a READ")
    deadline = time.monotonic() + PATIENCE
    while True:
        before = reads()
        equal(read(f"{S}/kept"), b"data")
        if reads() == before:
            break
        assert time.monotonic() < deadline, "each open drops the contents"
    before = reads()
    for _ in range(20):
        equal(read(f"{S}/kept"), b"data")
    equal(reads(), before)
    for number in range(20):
        host(f"printf %04d {number} >kept")
        equal(read(f"{S}/kept"), b"%04d" % number)


def missing_for_a_second():
    """The share n is the same directory with --negative-timeout=1."""
    refused(ENOENT, os.stat, "/mnt/n/short")
    host("echo x >short")
    seen("a name that was missing", lambda: os.stat("/mnt/n/short").st_size, ENOENT, 2, SOON)
    # The guest's own file is there at once.
    refused(ENOENT, os.stat, f"{S}/mine")
    host("echo theirs >mine")
    refused(ENOENT, os.stat, f"{S}/mine")
    fd = os.open(f"{S}/mine", os.O_RDWR | os.O_CREAT, 0o644)
    equal(os.read(fd, 100), b"theirs\n")
    os.close(fd)
    equal(os.stat(f"{S}/mine").st_size, 7)


def without_event():
    """The share n is the same directory with --lease-timeout=2. The host causes no event, and the guest sees it nevertheless."""
    n = "/mnt/n"
    host("mkdir quiet hidden; for f in mapped linked flag open; do echo old >quiet/$f; done; echo new >replacing")
    # A store through a mapping that stays, and is dirty.
    look = lambda: read(f"{n}/quiet/mapped")
    equal(look(), b"old\n")
    program = (
        "import mmap, os, time; f = open('quiet/mapped', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[:3] = b'new'; "
        # At most two minutes: a guest that has failed says no more.
        "open('../meet/stored', 'w').close(); any(os.path.exists('../meet/stop') or time.sleep(0.01) for _ in range(12_000))"
    )
    host(f"""(python3 -c "{program}"; touch ../meet/stopped) >/dev/null 2>&1 &
        until [[ -e ../meet/stored ]]; do sleep 0.02; done""")
    seen("a store through a mapping", look, b"old\n", b"new\n", SOON)
    write(f"{MEET}/stop", b"")
    await_file(f"{MEET}/stopped")
    # Another link, in a directory that the guest does not know.
    size = lambda: os.stat(f"{n}/quiet/linked").st_size
    equal(size(), 4)
    host("ln quiet/linked hidden/linked; echo more >>hidden/linked")
    seen("a change by a hidden link", size, 4, 9, SOON)
    changed = lambda: os.stat(f"{n}/quiet/flag").st_ctime_ns
    before = changed()
    host("chattr +d quiet/flag")
    seen("a flag of chattr(1)", lambda: changed() != before, False, True, SOON)
    # The guest has it open, and it loses its last name.
    fd = os.open(f"{n}/quiet/open", os.O_RDWR)
    equal(os.fstat(fd).st_nlink, 1)
    host("mv replacing quiet/open")
    seen("a file replaced while it is open", lambda: os.fstat(fd).st_nlink, 1, 0, SOON)
    os.close(fd)


def many_changes():
    """More changes than the daemon keeps for the agent, while the guest stands still. Then the agent shows the guest everything again."""
    host("mkdir flood; for f in $(seq 100); do echo old >flood/$f; done")
    f = f"{S}/flood"
    keep(lambda: [read(f"{f}/{number}") for number in range(1, 101)], [b"old\n"] * 100)
    # The guest's kernel has several names of one file, and the last that it learned stays.
    host("cd flood; for n in a b c; do ln 10 $n; done")
    keep(lambda: [read(f"{f}/{name}") for name in "abc"], [b"old\n"] * 3)
    changes = "seq 1001 51000 | xargs touch; for f in $(seq 100); do echo new >$f; done; rm 7 a b; mv 8 9"
    host(f"stop_guest; (cd flood; {changes}); continue_guest", 300)
    new = [ENOENT if number in (7, 8) else b"new\n" for number in range(1, 101)]
    look = lambda: [result(lambda: read(f"{f}/{number}")) for number in range(1, 101)]
    seen("the contents of 100 files", look, None, new, TOLD)
    names = lambda: [result(lambda: read(f"{f}/{name}")) for name in "abc"]
    seen("the names of one file", names, None, [ENOENT, ENOENT, b"new\n"], TOLD)
    host("echo newer >flood/50")
    seen("a change after that", lambda: read(f"{f}/50"), b"new\n", b"newer\n", TOLD)


# What guest a has of the same directory with other options of the daemon.
MORE_SHARES = {"negative": ("n",), "agent": ("n",)}
for tag in ("meet", "s") + (MORE_SHARES.get(mode, ()) if role == "a" else ()):
    mount(tag)
agent = start_agent()
if role == "b":
    obey()
else:
    more = {"auto": [kept], "agent": [without_event, many_changes], "negative": [missing_for_a_second]}
    steps((by_itself,), (by_the_host,), (by_another_guest,), *((step,) for step in more.get(mode, ())))
    guest_b("end")
    # The other share, if there is one, is left to the end of the guest.
# The agent holds no mount.
umount("s")
umount("meet")
if agent:
    agent.terminate()
    equal(agent.wait(), 0)
