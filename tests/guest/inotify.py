#!/usr/bin/env python3
"""What the host does to the share reaches the guest's inotify(7), once each. Says "step N" before the host is to do its step N, which is
in tests/host/case-notifications.sh."""

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections import Counter

sys.path.insert(0, "/host")
from check import equal, libc

SHARE = "/mnt/s"
MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED, ISDIR = 0x400, 0x800, 0x4000, 0x8000, 0x40000000
ALL = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF
# A limit on hangs, in seconds.
LIMIT = 100
steps = 0


def step():
    global steps
    steps += 1
    print("step", steps, flush=True)


class Watch:
    def __init__(self):
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        self.paths = {}

    def add(self, path, mask=ALL):
        descriptor = libc.inotify_add_watch(self.fd, os.path.join(SHARE, path).encode(), ctypes.c_uint32(mask))
        assert descriptor > 0, os.strerror(ctypes.get_errno())
        self.paths[descriptor] = path

    def read(self):
        """Waits for events: (path, mask, cookie, name)."""
        ready, _, _ = select.select([self.fd], [], [], LIMIT)
        assert ready, "no event came"
        data, at, events = os.read(self.fd, 1 << 20), 0, []
        while at < len(data):
            descriptor, mask, cookie, length = struct.unpack_from("iIII", data, at)
            assert not mask & OVERFLOW, "events were lost"
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            events.append((self.paths[descriptor], mask, cookie, name))
            at += 16 + length
        return events

    def until(self, last):
        """All events up to this one, (path, mask, name)."""
        events = []
        while last not in [(path, mask, name) for path, mask, _, name in events]:
            events += self.read()
        return events

    def expect(self, *due):
        """These come, and the last one comes last."""
        got = [(path, mask, name) for path, mask, _, name in self.until(due[-1])]
        equal(got, list(due))


def single_changes(watch):
    step()
    watch.expect(("d", CREATE, "a"), ("d", MODIFY, "a"), ("d", CLOSE_WRITE, "a"))
    step()
    watch.expect(("d", ATTRIB, "a"))
    step()
    moves = watch.until(("e", MOVED_TO, "b"))
    equal([(path, mask, name) for path, mask, _, name in moves], [("d", MOVED_FROM, "a"), ("e", MOVED_TO, "b")])
    assert moves[0][2] == moves[1][2] != 0, "the halves of a rename have different cookies"
    step()
    watch.expect(("d", CREATE | ISDIR, "sub"))
    step()
    watch.expect(("d", DELETE | ISDIR, "sub"))


def the_guests_own(watch):
    """As on a local file system, and not a second time from the host."""
    with open(f"{SHARE}/d/own", "w", encoding="ascii") as file:
        file.write("own")
    os.unlink(f"{SHARE}/d/own")
    watch.expect(("d", CREATE, "own"), ("d", MODIFY, "own"), ("d", CLOSE_WRITE, "own"), ("d", DELETE, "own"))
    # If there were more, they would come before this.
    step()
    watch.expect(("d", CREATE | ISDIR, "sentinel"))


def a_file_itself():
    watch = Watch()
    watch.add("f")
    step()
    watch.expect(("f", MODIFY, ""), ("f", CLOSE_WRITE, ""))
    step()
    events = watch.until(("f", IGNORED, ""))
    equal(Counter(mask for _, mask, _, _ in events)[DELETE_SELF], 1)


def many():
    """Each of 10,000 changes once, in steps that no queue overflows with."""
    watch = Watch()
    watch.add("many", CREATE | DELETE)
    for start in range(0, 10000, 1000):
        step()
        seen = []
        while len(seen) < 1000:
            seen += [(mask, name) for _, mask, _, name in watch.read()]
        equal(Counter(seen), Counter((CREATE, str(number)) for number in range(start, start + 1000)))


def tail():
    path = f"{SHARE}/log"
    with open("/tmp/tail", "wb") as out:
        process = subprocess.Popen(["tail", "-n", "+1", "-F", path], stdout=out, stderr=subprocess.DEVNULL)
    end = time.monotonic() + LIMIT
    for due in ("first\n", "first\nsecond\n", "first\nsecond\nthird\n"):
        step()
        while (got := open("/tmp/tail", encoding="ascii").read()) != due:
            assert time.monotonic() < end, f"tail: {got}"
            time.sleep(0.01)
    process.kill()


# Bound by name: ctypes knows no types of them.
libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
both = Watch()
both.add("d")
both.add("e")
single_changes(both)
print("ok single changes", flush=True)
the_guests_own(both)
print("ok own changes", flush=True)
a_file_itself()
print("ok a file", flush=True)
many()
print("ok many", flush=True)
tail()
print("ok tail", flush=True)
step()
