#!/usr/bin/python3
"""The host changes mapped files: dax-host.py MODE TRUNCATIONS."""

import os
import random
import signal
import sys

sys.path.insert(0, "/host")
from window import *

mode, truncations = sys.argv[1], int(sys.argv[2])
SIZE, KEPT = 2 * RANGE, RANGE + 5000


def make(name, size=SIZE, seed=1):
    return host_file(name, size, seed)


def each_page(view):
    """Reads the first bytes of every page. This maps each page."""
    return b"".join(view[at : at + 8] for at in range(0, len(view), 4096))


def firsts(data):
    return b"".join(data[at : at + 8] for at in range(0, len(data), 4096))


def dies_by_sigbus(view, at):
    pid = os.fork()
    if pid == 0:
        view[at]
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS, f"an access past the end: status {status}"


def truncated(command, left):
    """The guest sees what is left, then zeroes up to the size that it knows, then the new size, then what the host writes."""
    path, old = make("truncated"), pattern(SIZE)
    with mapped(path, SIZE, writable=True) as view:
        equal(each_page(view), firsts(old))
        view[0:8] = b"mapped00"
        due = b"mapped00"[:left] + old[8:left]
        took = timed(command.format("truncated"))
        got = view[:]
        assert got[:left] == due, "the contents below the new size have changed"
        assert not any(got[left:]), f"not zeroes past the end, but {bytes(b for b in got[left:] if b)[:8]}"
        # The guest may write there, but the file does not grow.
        view[SIZE - 8 :] = b"nowhere!"
        seen(f"the size after {command}", lambda: os.stat(path).st_size, left)
        dies_by_sigbus(view, SIZE - 8)
        assert read(path) == due, "read(2) gives other contents"
        equal(host_number("stat -c %s truncated"), left)
        if left:
            host("printf afterwards | dd of=truncated bs=1 conv=notrunc status=none")
            seen("what the host wrote then", lambda: view[:10], b"afterwards")
        host("printf further >>truncated")
        whole = (b"afterwards" + due[10:] if left else b"") + b"further"
        seen("what the host appended", lambda: read(path), whole)
        seen("the same by mmap", lambda: read_mapped(path), whole)
        # The same through the old mapping, which the guest keeps all the time.
        equal(view[: len(whole)], whole)
        view[left : left + 7] = b"FURTHER"
        view.flush()
        equal(host("tail -c 7 truncated"), "FURTHER")
    print(f"the host's process took {took:.3f} s for {command}", flush=True)


def unlinked():
    path = make("unlinked")
    with mapped(path, SIZE, writable=True) as view:
        equal(each_page(view), firsts(pattern(SIZE)))
        timed("rm unlinked")
        equal(each_page(view), firsts(pattern(SIZE)))
        view[KEPT : KEPT + 8] = b"unlinked"
        drop_caches()
        equal(view[KEPT : KEPT + 8], b"unlinked")
        seen("the removal", lambda: os.path.exists(path), False)
        equal(each_page(view), firsts(pattern(SIZE)[:KEPT] + b"unlinked" + pattern(SIZE)[KEPT + 8 :]))


def renamed():
    path = make("old")
    with mapped(path, SIZE, writable=True) as view:
        view[0:8] = b"mapped00"
        timed("mv old renamed")
        view[8:16] = b"mapped01"
        seen("the new name", lambda: os.path.exists(f"{S}/renamed") and not os.path.exists(path), True)
        equal(read(f"{S}/renamed")[:16], b"mapped00mapped01")
        equal(host("head -c 16 renamed"), "mapped00mapped01")
        drop_caches()
        equal(each_page(view)[16:], firsts(pattern(SIZE))[16:])


def replaced():
    """An editor replaces the file: the mapping keeps the old file, an open gets the new one."""
    path = make("replaced")
    with mapped(path, SIZE, writable=True) as view:
        equal(each_page(view), firsts(pattern(SIZE)))
        make("replaced", RANGE + 1, 9)
        seen("the new file", lambda: read_mapped(path) == pattern(RANGE + 1, 9), True)
        equal(each_page(view), firsts(pattern(SIZE)))
        view[0:8] = b"old file"
        drop_caches()
        equal(view[0:8], b"old file")
        assert read(path) == pattern(RANGE + 1, 9), "a write through the old file's mapping is in the new file"


def under_load(command):
    """The host truncates the file again and again while two processes read and write every page. Only the host sets its length."""
    path = make("load")
    rng = random.Random(3)
    with mapped(path, SIZE, writable=True) as view:
        fd = os.open(path, os.O_RDWR)

        def reads():
            each_page(view)
            # read(2) through the mapping, whatever size the guest knows.
            os.pread(fd, RANGE, rng.randrange(SIZE))

        def writes():
            for at in range(64, SIZE, 4096):
                view[at : at + 4] = b"load"

        with Busy(reads, "reads") as reader, Busy(writes, "writes") as writer:
            slowest = 0
            for turn in range(truncations):
                size = rng.randrange(SIZE)
                slowest = max(slowest, timed(command.format(size=size)))
                equal((turn, host_number("stat -c %s load")), (turn, size))
                timed(f"truncate -s {SIZE} load")
                equal((turn, host_number("stat -c %s load")), (turn, SIZE))
            reads_done, writes_done = reader.rounds(), writer.rounds()
        os.close(fd)
    print(f"{truncations} truncations under {reads_done} rounds of reads and {writes_done} of writes: {slowest:.2f} s at most")
    host("head -c 9000 /dev/zero | tr '\\0' x >load")
    # After 2 s all dirty pages are written back.
    time.sleep(2)
    equal(host("tr -d x <load | wc -c && stat -c %s load").split(), ["0", "9000"])
    seen("the last contents", lambda: read(path), b"x" * 9000)
    seen("the last contents by mmap", lambda: read_mapped(path), b"x" * 9000)
    write(path, b"guest", flags=os.O_WRONLY)
    # Stores may go to a copy for up to 50 ms, while the file's end is in a mapped part.
    seen("what the guest writes then", lambda: host("head -c 6 load"), "guestx")
    host("rm load")


mount("meet")
mount("s", mode)
steps(
    (truncated, f"truncate -s {KEPT} {{0}}", KEPT),
    (truncated, "truncate -s 100 {0}", 100),
    (truncated, ": >{0}", 0),
    (unlinked,),
    (renamed,),
    (replaced,),
    (under_load, "truncate -s {size} load"),
    (under_load, "head -c {size} /dev/urandom >load"),
)
umount("s")
equal(host_number("live_mappings"), 0)
umount("meet")
