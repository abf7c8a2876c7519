#!/usr/bin/python3
"""One of two guests that share the directory /mnt/s and meet in /mnt/meet: duo.py a|b WITHIN PART...

A change of the other guest must be visible within WITHIN seconds.
"""

import fcntl
import os
import stat
import struct
import sys
import time
from errno import *

sys.path.insert(0, "/host")
from check import *
from meet import *

role, within = sys.argv[1], float(sys.argv[2])
other = {"a": "b", "b": "a"}[role]
S = "/mnt/s"
slowest = 0.0


def seen(what, function, due):
    """Waits until the change is visible, within the time allowed."""
    global slowest
    start = time.monotonic()
    while True:
        try:
            got = function()
        except OSError as error:
            got = error.errno
        took = time.monotonic() - start
        if got == due:
            slowest = max(slowest, took)
            print(f"ok {role} sees {what} after {took:.2f} s", flush=True)
            return
        assert took <= within, f"{what}: {got!r}, expected {due!r} after {took:.2f} s"
        # On NFS a name stays the file that it was while the file is open, and the daemon closes it a little later than its user.
        time.sleep(within / 100)


def step(what, change, look, due):
    """Guest a changes something. Guest b, which has looked before, sees the change."""
    if role == "b":
        try:
            look()
        except OSError:
            pass
    meet(role)
    if role == "a":
        change()
    meet(role)
    if role == "b":
        seen(what, look, due)


def changes():
    f = f"{S}/file"
    step("a new file", lambda: write(f, b"one"), lambda: os.listdir(S), ["file"])
    step("its contents", lambda: write(f, b"one"), lambda: read(f), b"one")
    step("other contents", lambda: write(f, b"two"), lambda: read(f), b"two")
    step("longer contents", lambda: write(f, b"three" * 10_000), lambda: read(f), b"three" * 10_000)
    step("a larger size", lambda: os.truncate(f, 70_000), lambda: os.stat(f).st_size, 70_000)
    step("a smaller size", lambda: os.truncate(f, 3), lambda: os.stat(f).st_size, 3)
    step("another mode", lambda: os.chmod(f, 0o600), lambda: stat.S_IMODE(os.stat(f).st_mode), 0o600)
    step("another owner", lambda: os.chown(f, 5, 6), lambda: (os.stat(f).st_uid, os.stat(f).st_gid), (5, 6))
    step("an attribute", lambda: os.setxattr(f, "user.x", b"y"), lambda: os.getxattr(f, "user.x"), b"y")
    step("a rename", lambda: os.rename(f, f + "2"), lambda: os.stat(f).st_size, ENOENT)
    step("its new name", lambda: None, lambda: os.stat(f + "2").st_size, 3)
    step("a removal", lambda: os.unlink(f + "2"), lambda: os.stat(f + "2").st_size, ENOENT)
    step("a directory", lambda: os.makedirs(f"{S}/d/e"), lambda: os.listdir(f"{S}/d"), ["e"])
    step("a directory's removal", lambda: os.removedirs(f"{S}/d/e"), lambda: os.path.exists(f"{S}/d"), False)
    step("a link", lambda: os.symlink("target", f"{S}/l"), lambda: os.readlink(f"{S}/l"), "target")
    # A name appears that b has looked up in vain.
    step("a name once missing", lambda: write(f"{S}/late", b"x"), lambda: read(f"{S}/late"), b"x")
    # A file is replaced under its name, as editors do.
    step("a replacement", lambda: (write(f"{S}/new", b"fresh"), os.rename(f"{S}/new", f"{S}/late")), lambda: read(f"{S}/late"), b"fresh")
    if role == "b":
        print(f"note: the slowest change was seen after {slowest:.2f} s", flush=True)


def appends():
    count = 1000
    meet(role)
    fd = os.open(f"{S}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in range(count):
        os.write(fd, b"%s%05d\n" % (role.encode() * 10, number))
    os.close(fd)
    meet(role)
    fd = os.open(f"{S}/log", os.O_RDONLY)
    time.sleep(within)
    lines = read(f"{S}/log").splitlines()
    for guest in b"ab":
        mine = [line for line in lines if line[0] == guest]
        equal(mine, [bytes([guest]) * 10 + b"%05d" % number for number in range(count)])
    equal(len(lines), 2 * count)


def locks():
    f = f"{S}/locked"
    if role == "a":
        write(f, b"")
    meet(role)
    fd = os.open(f, os.O_RDWR)
    kinds = {
        "flock": (lambda how: fcntl.flock(fd, how), "flock"),
        "fcntl": (lambda how: fcntl.lockf(fd, how), "fcntl"),
    }
    for name, (lock, _) in kinds.items():
        if role == "a":
            lock(fcntl.LOCK_EX)
        meet(role)
        if role == "b":
            refused(EAGAIN, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            refused(EAGAIN, lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if name == "fcntl":
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
                equal(struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0], fcntl.F_WRLCK)

            def wait():
                mine = os.open(f, os.O_RDWR)
                (fcntl.flock if name == "flock" else fcntl.lockf)(mine, fcntl.LOCK_EX)

            with Waiter(wait) as waiter:
                assert not waiter.done_within(1), f"{name}: got a lock that the other guest holds"
                for number in range(50):
                    write(f"{S}/{name}-{number}", b"x")
                    equal(read(f"{S}/{name}-{number}"), b"x")
                assert not waiter.done_within(0)
                meet(role)
                assert waiter.done_within(PATIENCE), f"{name}: the lock is free, but the waiting process did not get it"
        else:
            meet(role)
            lock(fcntl.LOCK_UN)
        meet(role)
        # Both may hold a shared lock at the same time.
        lock(fcntl.LOCK_SH | fcntl.LOCK_NB)
        meet(role)
        lock(fcntl.LOCK_UN)
        meet(role)
        print(f"ok {role} {name}", flush=True)
    # The locks of a guest that ended are free: a ends first, holding its lock.
    if role == "a":
        fcntl.flock(fd, fcntl.LOCK_EX)
        meet(role)
    else:
        meet(role)
        with Waiter(lambda: fcntl.flock(os.open(f, os.O_RDWR), fcntl.LOCK_EX)) as waiter:
            assert waiter.done_within(PATIENCE), "the other guest has ended, but not its lock"
        print("ok b gets the lock of a guest that has ended", flush=True)


try:
    for part in sys.argv[3:]:
        {"changes": changes, "appends": appends, "locks": locks}[part]()
except AssertionError as error:
    print(f"FAILED {role}: {error}", flush=True)
    sys.exit(1)
