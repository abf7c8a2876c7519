#!/usr/bin/python3
"""One of two guests that map the same files: dax-duo.py a|b TURNS TRUNCATIONS."""

import os
import random
import sys

sys.path.insert(0, "/host")
from meet import *
from window import *

role, count, truncations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
other = {"a": "b", "b": "a"}[role]
# Each guest writes to a range of its own.
PLACES = {"a": 100, "b": RANGE + 100}
SIZE = 2 * RANGE


def requests():
    return host_number("requests s@a") + host_number("requests s@b") if role == "a" else 0


def await_number(view, due):
    at = PLACES[other]
    deadline = time.monotonic() + PATIENCE
    while (got := int.from_bytes(view[at : at + 4], "little")) != due:
        assert got == due - 1, f"{got}, expected {due - 1} or {due}"
        assert time.monotonic() < deadline, f"{due} of the other guest is not seen within {PATIENCE} s"


def handed_over():
    """The guests pass bytes to each other without a request."""
    path = f"{S}/file"
    with mapped(path, SIZE, writable=True) as view:
        # Both touch each page before requests are counted.
        view[PLACES[role] + 8 : PLACES[role] + 12] = b"here"
        assert view[PLACES[other] : PLACES[other] + 4] == bytes(4)
        meet(role)
        assert view[PLACES[other] + 8 : PLACES[other] + 12] == b"here", "the other guest's first bytes are not seen"
        before = requests()
        meet(role)
        for number in range(1, count + 1):
            if role == "a":
                view[PLACES["a"] : PLACES["a"] + 4] = number.to_bytes(4, "little")
            await_number(view, number)
            if role == "b":
                view[PLACES["b"] : PLACES["b"] + 4] = number.to_bytes(4, "little")
        meet(role)
        after = requests()
        # Both release their mappings only after this.
        meet(role)
        if role == "a":
            print(f"note: {count} turns by mmap between two guests: {before} requests before, {after} after")
            equal(after, before)
            os.path.exists(f"{S}/no such file")
            assert requests() > after, "the requests are not counted"
    meet(role)


def truncate_often(path, least):
    rng = random.Random(role)
    for _ in range(truncations):
        os.truncate(path, rng.randrange(least, SIZE))
        os.truncate(path, SIZE)


def truncated_by(who):
    """A guest that does not know the new size continues with its mapping."""
    path = f"{S}/by-{who}"
    if role == who:
        write(path, b"x" * SIZE)
    meet(role)
    if role == who:
        meet(role)
        truncate_often(path, 0)
        meet(role)
    else:
        with mapped(path, SIZE, writable=True) as view:

            def work():
                for at in range(0, SIZE, 4096):
                    assert view[at] in b"x\0y", f"{view[at]} at {at}"
                    view[at] = ord("y")

            with Busy(work, f"the mapping of {role}"):
                meet(role)
                # The other guest is at work.
                meet(role)
    equal(os.stat(path).st_size, SIZE)


def truncated_by_both():
    """Neither guest waits for the other forever."""
    path = f"{S}/by-both"
    if role == "a":
        write(path, bytes(SIZE))
    meet(role)
    with mapped(path, SIZE, writable=True) as view:

        def work():
            # This part is never cut off.
            for at in range(0, RANGE, 4096):
                view[at + (role == "b")] = ord(role)

        with Busy(work, f"the mapping of {role}"):
            meet(role)
            truncate_often(path, RANGE)
        meet(role)
        equal(bytes(view[at] for at in range(4)), b"ab\0\0")


mount("meet")
mount("s", "always")
steps((handed_over,), (truncated_by, "a"), (truncated_by, "b"), (truncated_by_both,))
umount("s")
umount("meet")
