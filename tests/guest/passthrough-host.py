#!/usr/bin/python3
"""The host changes passed-through files: passthrough-host.py TRUNCATIONS."""

import errno
import os
import random
import signal
import sys

sys.path.insert(0, "/host")
from window import *

truncations = int(sys.argv[1])
SIZE = 4 << 20


def make(name, size=SIZE, seed=1, new=False):
    return host_file(name, size, seed, new)


def written():
    """The guest sees the host's writes at once, since both use one cache."""
    path = make("written")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        equal(view[:8], pattern(8))
        host("printf 'by host!' | dd of=written bs=1 seek=8192 conv=notrunc status=none")
        equal((view[8192:8200], os.pread(fd, 8, 8192)), (b"by host!", b"by host!"))
        view[8192:8197] = b"guest"
        equal(host("dd if=written bs=1 skip=8192 count=8 status=none"), "guestst!")
    os.close(fd)


def extended():
    path = make("extended")
    fd = os.open(path, os.O_RDWR)
    equal(os.pread(fd, 8, 0), pattern(8))
    host("printf further >>extended")
    seen("the new size", lambda: os.stat(path).st_size, SIZE + 7)
    equal(os.pread(fd, 100, SIZE), b"further")
    host(f"head -c {SIZE} /dev/zero | tr '\\0' z >>extended")
    seen("what lies beyond the slot", lambda: os.pread(fd, 2, 2 * SIZE), b"zz")
    os.close(fd)


def truncated(command, left):
    path, old = make("truncated"), pattern(SIZE)
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        assert view[:] == old
        os.pwrite(fd, b"in place", 0)
        due = (b"in place" + old[8:])[:left]
        took = timed(command.format("truncated"))
        seen(f"the size after {command}", lambda: os.fstat(fd).st_size, left)
        equal(os.pread(fd, SIZE, 0), due)
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            view[SIZE - 8]
            os._exit(0)
        equal(os.WTERMSIG(os.waitpid(pid, 0)[1]), signal.SIGBUS)
        if left:
            assert view[:left] == due
        host("printf further >>truncated")
        seen("what the host appended", lambda: os.pread(fd, SIZE, 0), due + b"further")
        if left:
            view[0:5] = b"again"
            equal(host("head -c 5 truncated"), "again")
    os.close(fd)
    print(f"the host's process took {took:.3f} s for {command}", flush=True)


def replaced():
    path = make("replaced")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        equal(view[:8], pattern(8))
        make("replaced", 5001, 9)
        seen("the new file", lambda: read(path) == pattern(5001, 9), True)
        view[0:8] = b"old file"
        equal(os.pread(fd, 8, 0), b"old file")
        assert read(path) == pattern(5001, 9), "a write through the old file's mapping is in the new file"
    os.close(fd)
    host("rm replaced")


def pinned():
    """The host truncates a file while a page of it is in a pipe. Other files get no memory that the page may still show."""
    path = make("pinned")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        reader, writer = page_in_a_pipe(view)
    timed(": >pinned")
    seen("that the pinned file is empty", lambda: os.fstat(fd).st_size, 0)
    # More than the window has room for.
    for number in range(5):
        other = make(f"other-{number}", seed=number + 10, new=True)
        with mapped(other, SIZE) as view:
            assert view[:] == pattern(SIZE, number + 10)
    assert os.read(reader, 4096) in (pattern(4096), bytes(4096)), "the pipe has another file's bytes"
    host("printf further >>pinned")
    seen("what the host appended", lambda: os.pread(fd, 100, 0), b"further")
    # The daemon cannot know that nobody stored to the page.
    refused(errno.EIO, os.fsync, fd)
    for descriptor in fd, reader, writer:
        os.close(descriptor)
    host("rm pinned other-*")


def held():
    """A direct read gets all pages of its buffer while a revocation waits for one that is in use: it could be its own."""
    path = make("held")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        reader, writer = page_in_a_pipe(view)
        # The guest must let go, since its stores may have no room now. The daemon waits for that without a limit.
        # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        call("fallocate", fd, 3, ctypes.c_long(SIZE - 4096), ctypes.c_long(4096))
        with memoryview(view) as buffer, buffer[4096:65536] as rest:
            read_disk(rest)
        equal(os.read(reader, 4096), pattern(4096))
        # The guest has let go of all by then.
        view[SIZE - 1] = 1
    for descriptor in fd, reader, writer:
        os.close(descriptor)
    host("rm held")


def late():
    """How often the daemon did not wait until the guest had let go."""
    return host_number("grep -c 'did not let go' ../daemons.logs/daemon-s.log || true")


def under_load(command):
    """The host truncates the file again and again while eight processes read and write. Only the host sets its length."""
    # The mapped part is never cut off.
    least = 64 << 10
    path = make("load")
    fd = os.open(path, os.O_RDWR)
    # Byte 0: a direct read could not go on. That may happen if the guest is too late, as on a slow machine.
    cut, before = mmap.mmap(-1, mmap.PAGESIZE), late()

    def reads():
        os.pread(fd, random.randrange(1, 100_000), random.randrange(SIZE))

    def writes():
        # A kind of write that shows where it was made and does not extend the file.
        at = random.randrange(0, SIZE - 4096, 4096)
        if at + 4096 <= os.fstat(fd).st_size:
            os.pwrite(fd, b"load", at)

    def mapped_reads():
        with mapped(path, least) as view:
            for at in range(0, least, 4096):
                view[at]

    def direct_reads():
        with mapped(path, least, writable=True) as view, memoryview(view) as buffer:
            try:
                whole = os.preadv(disk, [buffer], 0) == least
            except OSError as error:
                equal(error.errno, errno.EFAULT)
                whole = False
        if not whole:
            cut[0] = 1

    busy = [Busy(reads, f"reads {n}") for n in range(4)] + [Busy(mapped_reads, "mapped"), Busy(direct_reads, "direct")]
    slowest = 0
    with busy[0], busy[1], busy[2], busy[3], busy[4], busy[5]:
        for turn in range(truncations):
            size = random.randrange(least, SIZE)
            slowest = max(slowest, timed(command.format(size=size)))
            equal((turn, host_number("stat -c %s load")), (turn, size))
            timed(f"truncate -s {SIZE} load")
        rounds = sum(one.rounds() for one in busy)
    assert not cut[0] or late() > before, "a direct read was cut off although the guest let go in time"
    os.close(fd)
    path = make("load", seed=3)
    fd = os.open(path, os.O_RDWR)
    with Busy(reads, "reads"), Busy(writes, "writes") as writer:
        for turn in range(truncations):
            timed(command.format(size=random.randrange(least, SIZE)))
            timed(f"truncate -s {SIZE} load")
        assert writer.rounds() > 0
    os.close(fd)
    print(f"{truncations} truncations under {rounds} rounds of reads: {slowest:.2f} s at most", flush=True)
    host("head -c 9000 /dev/zero | tr '\\0' x >load")
    seen("the last contents", lambda: read(path), b"x" * 9000)
    write(path, b"guest", flags=os.O_WRONLY)
    equal(host("head -c 6 load"), "guestx")


disk = os.open("/dev/vda", os.O_RDONLY | os.O_DIRECT)
mount("meet")
mount("s")
steps(
    (written,),
    (extended,),
    (truncated, "truncate -s 2097152 {0}", 2 << 20),
    (truncated, "truncate -s 5000 {0}", 5000),
    (truncated, ": >{0}", 0),
    (replaced,),
    (pinned,),
    (held,),
    (under_load, "truncate -s {size} load"),
)
umount("s")
umount("meet")
