#!/usr/bin/env python3
"""What the host and another guest do to the share reaches the guest's inotify(7) and fanotify(7), once each: inotify.py a|b NUMBER. Guest
b changes and watches at the same time. NUMBER files are changed by each, in hundreds."""

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections import Counter

sys.path.insert(0, "/host")
from changes import *
from fanotify import fanotify
from meet import *
from window import *

DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
ALL = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF
# A limit on hangs, in seconds.
LIMIT = 100


class Watch:
    def __init__(self):
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        self.paths = {}

    def add(self, path, mask=ALL):
        descriptor = libc.inotify_add_watch(self.fd, os.path.join(S, path).encode(), ctypes.c_uint32(mask))
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
    host("echo 1 >d/a")
    watch.expect(("d", CREATE, "a"), ("d", MODIFY, "a"), ("d", CLOSE_WRITE, "a"))
    host("chmod 600 d/a")
    watch.expect(("d", ATTRIB, "a"))
    host("mv d/a e/b")
    moves = watch.until(("e", MOVED_TO, "b"))
    equal([(path, mask, name) for path, mask, _, name in moves], [("d", MOVED_FROM, "a"), ("e", MOVED_TO, "b")])
    assert moves[0][2] == moves[1][2] != 0, "the halves of a rename have different cookies"
    host("mkdir d/sub")
    watch.expect(("d", CREATE | ISDIR, "sub"))
    host("rmdir d/sub")
    watch.expect(("d", DELETE | ISDIR, "sub"))


def the_guests_own(watch):
    """As on a local file system, and not a second time from the host."""
    with open(f"{S}/d/own", "w", encoding="ascii") as file:
        file.write("own")
    os.unlink(f"{S}/d/own")
    watch.expect(("d", CREATE, "own"), ("d", MODIFY, "own"), ("d", CLOSE_WRITE, "own"), ("d", DELETE, "own"))
    # If there were more, they would come before this.
    host("mkdir d/sentinel")
    watch.expect(("d", CREATE | ISDIR, "sentinel"))


def a_file_itself():
    watch = Watch()
    watch.add("f")
    host("echo 2 >>f")
    watch.expect(("f", MODIFY, ""), ("f", CLOSE_WRITE, ""))
    host("rm f")
    events = watch.until(("f", IGNORED, ""))
    equal(Counter(mask for _, mask, _, _ in events)[DELETE_SELF], 1)


def many():
    """Each creation once, in steps that no queue overflows with."""
    watch = Watch()
    watch.add("many", CREATE | DELETE)
    for start in range(0, 10 * files, 1000):
        host(f"for ((i = {start}; i < {start + 1000}; i++)); do : >many/$i; done")
        seen = []
        while len(seen) < 1000:
            seen += [(mask, name) for _, mask, _, name in watch.read()]
        equal(Counter(seen), Counter((CREATE, str(number)) for number in range(start, start + 1000)))


def mixed(start, changing, others):
    """Each of the 11 changes of a file once. `changing` makes those of some numbers. `others`: another guest makes them."""
    watch = Watch()
    watch.add("old")
    watch.add("new")
    for begin in range(start, start + files, 100):
        end = begin + 100
        changing(begin, end)
        seen, cookies = Counter(), {}
        while sum(seen.values()) < 1300:
            for path, mask, cookie, name in watch.read():
                seen[path, mask, name] += 1
                if mask & (MOVED_FROM | MOVED_TO):
                    cookies.setdefault(cookie, set()).add((mask, name))
        expected = due(begin, end)
        if others:
            # A guest closes a file at any time after its last process has: it may have its new name by then.
            seen, expected = (Counter((mask, name) for _, mask, name in c.elements()) for c in (seen, expected))
        equal(seen - expected, Counter())
        equal(expected - seen, Counter())
        equal(list(cookies.values()), [{(MOVED_FROM, str(n)), (MOVED_TO, str(n))} for n in range(begin, end)])
        assert 0 not in cookies
    return watch


def by_the_host():
    mixed(0, lambda begin, end: host(f"python3 $guest_dir/changes.py . {begin} {end}"), False)


def by_itself():
    watch = mixed(1000, lambda begin, end: change(S, begin, end), False)
    # If something came twice, it would come before this.
    host("mkdir old/sentinel")
    watch.expect(("old", CREATE | ISDIR, "sentinel"))


def by_each_other():
    """Guest b makes changes, and both guests hear of each once."""

    def changing(begin, end):
        # Both have heard of everything before.
        meet(role)
        if role == "b":
            change(S, begin, end)

    watch = mixed(2000, changing, role == "a")
    meet(role)
    if role == "a":
        host("mkdir old/end")
    watch.expect(("old", CREATE | ISDIR, "end"))


def tail():
    with open("/tmp/tail", "wb") as out:
        process = subprocess.Popen(["tail", "-n", "+1", "-F", f"{S}/log"], stdout=out, stderr=subprocess.DEVNULL)
    end = time.monotonic() + LIMIT
    text = ""
    for command in "echo first >>log", "echo second >>log", "mv log log.1; echo third >log":
        host(command)
        text += command.split()[-2] + "\n"
        while (got := read("/tmp/tail").decode()) != text:
            assert time.monotonic() < end, f"tail: {got}"
            time.sleep(0.01)
    process.kill()


role, files = sys.argv[1], int(sys.argv[2])
# Bound by name: ctypes knows no types of them.
libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
mount("s")
mount("meet")
start_agent()
# First, since the other guest waits for it.
meet(role)
by_each_other()
print("ok", role, "by each other", flush=True)
if role == "a":
    both = Watch()
    both.add("d")
    both.add("e")
    single_changes(both)
    print("ok single changes", flush=True)
    the_guests_own(both)
    print("ok own changes", flush=True)
    for part in a_file_itself, many, by_the_host, by_itself, tail, fanotify:
        part()
        print("ok", part.__name__, flush=True)
