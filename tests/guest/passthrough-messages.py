#!/usr/bin/python3
"""How many messages a passed-through file takes."""

import os
import random
import sys

sys.path.insert(0, "/host")
from window import *

SIZE = 64 << 20
# Of include/uapi/asm-generic/mman-common.h.
MADV_PAGEOUT = 21
# Counts the files that were passed through.
PASSED = "grep -c 'passthrough.*mapped=Ok' ../daemons.logs/daemon-s.log"
DATA = "READ", "WRITE", "SETUPMAPPING", "REMOVEMAPPING"


def asked(*opcodes):
    return host_number("requests s " + " ".join(opcodes))


def in_pieces():
    """Reads, overwrites in random 4 KiB blocks, and maps a file: one OPEN, one RELEASE, no data in messages."""
    host(f"head -c {SIZE} /dev/urandom >big")
    path, rng = f"{S}/big", random.Random(7)
    places = list(range(0, SIZE, 4096))
    before = {opcode: asked(opcode) for opcode in (*DATA, "OPEN", "RELEASE")}
    fd = os.open(path, os.O_RDWR)
    for _ in range(2):
        rng.shuffle(places)
        for at in places:
            page = os.pread(fd, 4096, at)
            os.pwrite(fd, page[::-1], at)
    view = mmap.mmap(fd, SIZE)
    rng.shuffle(places)
    for at in places:
        view[at] = view[at] ^ 255
    view.close()
    os.close(fd)
    # A worker of the kernel sends RELEASE.
    deadline = time.monotonic() + 10
    while asked("RELEASE") == before["RELEASE"] and time.monotonic() < deadline:
        time.sleep(0.05)
    cost = {opcode: asked(opcode) - count for opcode, count in before.items()}
    print(f"note: a file of 64 MiB read and written twice in pieces of 4 KiB, and mapped: {cost}", flush=True)
    # Making the mapping writable in the table takes no message. A hole would take a SETUPMAPPING.
    equal(cost, {**dict.fromkeys(DATA, 0), "OPEN": 1, "RELEASE": 1})


def opened_again():
    """A live slot takes no new mapping."""
    maps = "curl -s --unix-socket ../sockets/s.control http://daemon/metrics | awk '/^thruway_mappings.*passthrough/ { print $2 }'"
    fd = os.open(f"{S}/big", os.O_RDONLY)
    slots = host_number(maps)
    assert slots > 0, "nothing is mapped"
    os.close(fd)
    before = host_number(PASSED), asked("OPEN"), asked("READ")
    for _ in range(20):
        fd = os.open(f"{S}/big", os.O_RDWR)
        os.pread(fd, 100, 0)
        os.close(fd)
    equal((host_number(PASSED), asked("OPEN"), asked("READ")), (before[0], before[1] + 20, before[2]))
    equal(host_number(maps), slots)


def by_messages():
    """A file below the minimum size is not mapped."""
    write(f"{S}/small", b"x" * 1000)
    before = asked("READ")
    drop_caches()
    equal(read(f"{S}/small"), b"x" * 1000)
    assert asked("READ") > before, "READ is not counted"


def evicted():
    """Files whose pages the guest's kernel has evicted, and remembers, are passed through when they are opened again."""
    size, paths = 1 << 20, [f"{S}/evicted-{number}" for number in range(8)]
    for path in paths:
        # A new file is below the minimum size when it is opened.
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        equal(os.write(fd, pattern(size)), size)
        os.fsync(fd)
        with mmap.mmap(fd, size) as view:
            assert view[:] == pattern(size)
            view.madvise(MADV_PAGEOUT)
        os.close(fd)
    nodes = [line.split()[1] for line in open("/proc/vmstat") if line.startswith("workingset_nodes ")]
    assert int(nodes[0]) >= len(paths), f"the kernel remembers pages in {nodes[0]} nodes of {len(paths)} files"
    before = asked("READ"), host_number(PASSED)
    for path in paths:
        with mapped(path, size, writable=True) as view:
            assert view[:] == pattern(size)
            view[5000:5005] = b"store"
        equal(read(path)[5000:5005], b"store")
    equal((asked("READ"), host_number(PASSED)), (before[0], before[1] + len(paths)))


mount("meet")
mount("s")
steps((in_pieces,), (opened_again,), (by_messages,), (evicted,))
umount("s")
umount("meet")
