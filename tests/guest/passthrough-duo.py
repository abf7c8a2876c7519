#!/usr/bin/python3
"""One of two guests that work on the same files as the host: passthrough-duo.py a|b TURNS."""

import os
import random
import sys

sys.path.insert(0, "/host")
from meet import *
from window import *

role, turns = sys.argv[1], int(sys.argv[2])
other = {"a": "b", "b": "a"}[role]
PIECE = 10_000


def handed_over():
    """One guest sees what the other stores, without a message."""
    path = f"{S}/file"
    if role == "a":
        write(path, bytes(2 * RANGE))
    meet(role)
    mine, theirs = (0, RANGE) if role == "a" else (RANGE, 0)
    fd = os.open(path, os.O_RDWR)
    with mapped(path, 2 * RANGE, writable=True) as view:
        for number in range(1, turns + 1):
            # Alternate between the mapping and write(2).
            data = number.to_bytes(4, "little")
            if number % 2:
                view[mine : mine + 4] = data
            else:
                os.pwrite(fd, data, mine)
            deadline = time.monotonic() + PATIENCE
            while int.from_bytes(os.pread(fd, 4, theirs), "little") < number:
                assert time.monotonic() < deadline, f"{number} of the other guest is not seen"
            assert int.from_bytes(view[theirs : theirs + 4], "little") >= number
    os.close(fd)
    meet(role)


def grown(by, grow):
    """One guest extends the file while others read: each size that they see existed, and all data below it is there."""
    path = f"{S}/{by}"
    if role == "a":
        write(path, pattern(PIECE))
    meet(role)
    pieces = 100
    if by == "host" and role == "a":
        host(
            f"for i in $(seq {pieces}); do cat ../meet/piece >>host; sleep 0.02; done & sleep 0"
        )
    if by == role:
        meet(role)
        fd = os.open(path, os.O_RDWR)
        for number in range(1, pieces + 1):
            grow(fd, number)
            time.sleep(0.02)
        os.close(fd)
    else:
        if by in "ab":
            meet(role)
        fd = os.open(path, os.O_RDWR)
        size, deadline = 0, time.monotonic() + PATIENCE
        while size < (pieces + 1) * PIECE:
            assert time.monotonic() < deadline, f"the size stays {size}"
            now = os.fstat(fd).st_size
            assert now >= size and now % PIECE == 0, f"{now} after {size} is a size that the file never had"
            size = now
            assert len(os.pread(fd, PIECE, size - PIECE)) == PIECE, f"data below {size} is missing"
            with mapped(path, size) as view:
                assert view[size - PIECE : size - PIECE + 8] == pattern(8), f"other contents at {size - PIECE}"
        os.close(fd)
    meet(role)
    assert read(path) == pattern(PIECE) * (pieces + 1)
    meet(role)


def truncated_by_both():
    """Neither guest waits long for the other."""
    path = f"{S}/both"
    if role == "a":
        write(path, bytes(2 * RANGE))
    meet(role)
    fd, rng = os.open(path, os.O_RDWR), random.Random(role)

    def work():
        at = rng.randrange(RANGE)
        os.pwrite(fd, role.encode(), at)
        assert os.pread(fd, 1, at) in (b"a", b"b")

    with Busy(work, f"the file of {role}"):
        meet(role)
        for _ in range(turns // 10):
            os.truncate(path, rng.randrange(RANGE, 2 * RANGE))
            os.truncate(path, 2 * RANGE)
    meet(role)
    equal(os.stat(path).st_size, 2 * RANGE)
    os.close(fd)


def by_truncate_and_write(fd, number):
    os.pwrite(fd, pattern(PIECE), number * PIECE)


mount("meet")
mount("s")
if role == "a":
    write(f"{MEET}/piece", pattern(PIECE))
steps(
    (handed_over,),
    (grown, "a", by_truncate_and_write),
    (grown, "b", by_truncate_and_write),
    (grown, "host", None),
    (truncated_by_both,),
)
umount("s")
umount("meet")
