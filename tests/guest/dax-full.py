#!/usr/bin/python3
"""The host's disk is full: dax-full.py SHARE..., with the names of the shares."""

import os
import signal
import sys

sys.path.insert(0, "/host")
from window import *

SIZE = 16 * RANGE


def stores(path, ranges):
    """Stores to each page of these ranges in another process. Returns how that process ended."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with mapped(path, SIZE, writable=True) as view:
            for number in ranges:
                for at in range(number * RANGE, (number + 1) * RANGE, mmap.PAGESIZE):
                    view[at] = 1
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def full(tag):
    # A file that is mapped in place has no room for the store: SIGBUS. Elsewhere a copy takes it, and fsync reports the error.
    in_place = tag != "btrfs"
    mount(tag, "always")
    path = f"/mnt/{tag}/file"
    host(f"cd ../{tag}; truncate -s {SIZE} file; head -c {4 * RANGE} /dev/zero >filled; sync .")
    assert stores(path, range(2)) == 0, "a store fails although the disk has room"
    with mapped(path, SIZE) as view:
        # Map holes for reading.
        assert not any(view[at] for at in range(4 * RANGE, 6 * RANGE, mmap.PAGESIZE))
        host(f"cd ../{tag}; cat /dev/zero >filler 2>/dev/null; sync .; cat /dev/zero >>filler 2>/dev/null; sync .")
        ended = [stores(path, [number]) for number in (1, 2, 4, 8)]
        print(f"{tag}: processes that store ended with {ended}", flush=True)
        equal(ended, [0] + ([-signal.SIGBUS] * 3 if in_place else [0] * 3))
        # Ranges that are mapped for reading stay readable.
        assert not any(view[at] for at in range(5 * RANGE, 6 * RANGE, mmap.PAGESIZE))
    fd = os.open(path, os.O_RDWR)
    if in_place:
        refused(errno.ENOSPC, os.pwrite, fd, b"x" * 4096, 10 * RANGE)
    # Make a hole in a range that a process may store to.
    call("fallocate", fd, 3, ctypes.c_long(0), ctypes.c_long(RANGE))
    host(f"cd ../{tag}; cat /dev/zero >>filler 2>/dev/null; sync .; cat /dev/zero >>filler 2>/dev/null; sync .")
    assert stores(path, [0]) == 0, "a store to a copy fails"
    with mapped(path, SIZE) as view:
        equal(view[0], 1)
    try:
        os.fsync(fd)
    except OSError as error:
        equal(error.errno in (errno.ENOSPC, errno.EIO), True)
        print(f"{tag}: fsync reports it", flush=True)
    os.close(fd)
    print(f"{tag}: the guest is still running", flush=True)
    umount(tag)


mount("meet")
for tag in sys.argv[1:]:
    full(tag)
