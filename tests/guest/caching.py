#!/usr/bin/python3
"""What a guest sees, and when, after changes by itself, by another guest and by the host: caching.py a|b MODE.

docs/caching.md has the promises. Guest a looks. Guest b runs the commands that a sends.
"""

import os
import stat
import subprocess
import sys
import time
from errno import ENOENT

sys.path.insert(0, "/host")
from meet import *
from window import *

role, mode = sys.argv[1:3]

# At the next look; within PATIENCE; not before the guest has forgotten the file.
NOW, SOON, LATE = "at once", "soon", "not before the guest forgets"
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
}
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


def seen(what, look, old, new, when):
    """Checks that a change from `old` to `new`, which has been made, is seen when it was promised."""
    if when != SOON:
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
        change(f"cd {name}; {command}")
        seen(f"{name}: {what}", look, old, new, promised[what])

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
    reads = lambda: host_number("requests s@a Read")
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


for tag in ("meet", "s") + (("n",) if mode == "negative" and role == "a" else ()):
    mount(tag)
if role == "b":
    obey()
else:
    more = {"auto": ((kept,),), "negative": ((missing_for_a_second,),)}.get(mode, ())
    steps((by_itself,), (by_the_host,), (by_another_guest,), *more)
    guest_b("end")
    # The other share, if there is one, is left to the end of the guest.
umount("s")
umount("meet")
