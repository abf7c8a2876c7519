#!/usr/bin/python3
"""A passed-through file behaves like a local file: passthrough-files.py [STEP]..."""

import ctypes
import fcntl
import os
import random
import signal
import subprocess
import sys

sys.path.insert(0, "/host")
from rings import Aio, Uring, address, READ, WRITE
from window import *

SIZE = 3 << 20
IO = "READ", "WRITE"


def asked(*opcodes):
    return host_number("requests s " + " ".join(opcodes))


def make(name, data=None):
    path = f"{S}/{name}"
    write(path, pattern(SIZE) if data is None else data)
    return path


def on_host(name):
    return host(f"sha256sum <{name}").split()[0]


def digest(data):
    import hashlib

    return hashlib.sha256(data).hexdigest()


def read_and_written():
    path = make("rw")
    fd = os.open(path, os.O_RDWR)
    before = asked(*IO)
    due = bytearray(pattern(SIZE))
    rng = random.Random(1)
    for _ in range(300):
        at = rng.randrange(SIZE)
        length = min(rng.choice((1, 100, 4096, 5000, 200_000)), SIZE - at)
        if rng.random() < 0.5:
            data = rng.randbytes(length)
            equal(os.pwrite(fd, data, at), length)
            due[at : at + length] = data
        else:
            assert os.pread(fd, length, at) == due[at : at + length], f"{length} bytes at {at}"
    equal(os.preadv(fd, [a := bytearray(10), b := bytearray(4100)], 4090), 4110)
    assert a + b == due[4090:8200]
    equal(os.pwritev(fd, [b"x" * 10, b"y" * 4100], 4090), 4110)
    due[4090:8200] = b"x" * 10 + b"y" * 4100
    equal(os.lseek(fd, -5, os.SEEK_END), SIZE - 5)
    equal(os.read(fd, 100), bytes(due[-5:]))
    equal(os.read(fd, 100), b"")
    equal(asked(*IO), before)
    equal(on_host("rw"), digest(due))
    os.close(fd)


def mapped_every_way():
    path = make("mapped")
    data = pattern(SIZE)
    fd = os.open(path, os.O_RDWR)
    before = asked(*IO)
    with mapped(path, SIZE, writable=True) as view:
        assert view[:] == data
        view[5:10] = b"store"
        equal(os.pread(fd, 10, 0), data[:5] + b"store")
        os.pwrite(fd, b"write", 4096)
        equal(view[4096:4101], b"write")
        private = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE)
        private[8192:8195] = b"own"
        equal(view[8192:8195], data[8192:8195])
        equal(private[8192:8195] + private[8195:8200], b"own" + data[8195:8200])
        os.pwrite(fd, b"THRU!", 12288)
        equal(private[12288:12293], b"THRU!")
        assert private[16384] == data[16384]
        private[16384:16387] = b"own"
        equal(view[16384:16387], data[16384:16387])
        pid = os.fork()
        if pid == 0:
            private[20480:20483] = b"kid"
            view[24576:24579] = b"kid"
            os._exit(0)
        os.waitpid(pid, 0)
        equal(private[20480:20483], data[20480:20483])
        equal(view[24576:24579], b"kid")
        private.close()
        view.flush()
    equal(asked(*IO), before)
    equal(host("head -c 10 mapped | tail -c 5"), "store")
    os.close(fd)
    reader = os.open(path, os.O_RDONLY)
    refused(errno.EACCES, mmap.mmap, reader, SIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(reader)


def buffers_in_the_window():
    """Direct I/O with memory that belongs to the same or another passed-through file."""
    data = os.urandom(1 << 20)
    write("/tmp/source", data)
    path, other = make("buffer"), make("other", data)
    disk = os.open("/dev/vda", os.O_RDONLY | os.O_DIRECT)
    fd, other_fd = os.open(path, os.O_RDWR), os.open(other, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        parts = memoryview(view)
        equal(os.preadv(disk, [parts[: 1 << 20]], 0), 1 << 20)
        due = os.pread(os.open("/dev/vda", os.O_RDONLY), 1 << 20, 0)
        assert view[: 1 << 20] == due == os.pread(fd, 1 << 20, 0), "a disk's blocks by O_DIRECT"
        equal(os.preadv(other_fd, [parts[1 << 20 : 2 << 20]], 0), 1 << 20)
        assert view[1 << 20 : 2 << 20] == data, "another file's bytes"
        equal(os.preadv(fd, [parts[2 << 20 :]], 0), 1 << 20)
        assert view[2 << 20 :] == due, "the file's own bytes"
        equal(os.pwritev(other_fd, [parts[: 1 << 20]], 0), 1 << 20)
        assert read(other) == due
        del parts
    for descriptor in disk, fd, other_fd:
        os.close(descriptor)


def pages_in_a_pipe():
    """Pages held by vmsplice(2) keep their contents when the file is closed and truncated."""
    path = make("pipe", b"q" * 65536)
    with mapped(path, 65536, writable=True) as view:
        reader, writer = page_in_a_pipe(view)
    equal(os.read(reader, 4096), b"q" * 4096)
    os.close(reader)
    os.close(writer)


def truncated_while_in_use():
    """A truncation waits for a page that is in a pipe. A direct read that takes more of the pages that go gets them."""
    path = make("cut")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view, memoryview(view) as buffer, buffer[SIZE - 65536 :] as rest:
        reader, writer = page_in_a_pipe(view, SIZE - (1 << 20))
        child = os.fork()
        if child == 0:
            os.ftruncate(fd, 65536)
            os._exit(0)
        while read(f"/proc/{child}/stat").rpartition(b")")[2].split()[0] != b"S":
            time.sleep(0.01)
        read_disk(rest)
        equal(os.waitpid(child, os.WNOHANG), (0, 0))
    equal(os.read(reader, 4096), pattern(SIZE)[-(1 << 20) :][:4096])
    equal(os.waitpid(child, 0), (child, 0))
    equal(os.fstat(fd).st_size, 65536)
    for descriptor in fd, reader, writer:
        os.close(descriptor)
    os.unlink(path)


def growth_past_a_pinned_page():
    """A file outgrows its slot while a page of it is in a pipe that nobody reads."""
    path = make("pinned")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        reader, writer = page_in_a_pipe(view)
    piece = pattern(1 << 20, 2)
    for at in range(SIZE, 40 << 20, 1 << 20):
        equal(os.pwrite(fd, piece, at), 1 << 20)
    equal(os.pread(fd, 1 << 20, 39 << 20), piece)

    def store():
        with mapped(path, 39 << 20, writable=True) as view:
            view[20 << 20 : (20 << 20) + 5] = b"store"

    # A store may end its process by SIGBUS.
    in_child(store)
    equal(os.pread(fd, 5, 20 << 20), b"store")
    equal(os.read(reader, 4096), pattern(4096))
    for descriptor in fd, reader, writer:
        os.close(descriptor)
    os.unlink(path)


def asynchronous():
    """io_submit and io_uring: whole transfers, by descriptors with and without O_DIRECT, with memory of any kind."""
    path, data = make("async"), pattern(SIZE)
    other, due = make("other", data), bytearray(data)
    plain = mmap.mmap(-1, SIZE)
    third = SIZE // 3
    for flags in 0, os.O_DIRECT:
        fd = os.open(path, os.O_RDWR | flags)
        with mapped(other, SIZE, writable=True) as view:
            for start in Aio, Uring:
                for memory in plain, view:
                    at = address(memory)
                    with start() as engine:
                        memory[:] = bytes(SIZE)
                        pieces = [(fd, at + n * third, third, n * third) for n in range(3)]
                        equal(engine.transfer(READ, *pieces), [third] * 3)
                        assert memory[:] == due, f"{start.__name__} reads other bytes"
                        memory[0:4096] = due[0:4096] = os.urandom(4096)
                        equal(engine.transfer(WRITE, *pieces), [third] * 3)
                        assert read(path) == due, f"{start.__name__} writes other bytes"
                        # At the end of the file a read is short.
                        equal(engine.transfer(READ, (fd, at, 8192, SIZE - 4096), (fd, at, 4096, SIZE)), [4096, 0])
        os.close(fd)
    equal(on_host("async"), digest(due))


def registered():
    """Buffers of io_uring that are in a mapping: refused, as on a local file system with DAX, or they work."""
    path, data = make("registered"), os.urandom(1 << 20)
    write("/tmp/source", data)
    source = os.open("/tmp/source", os.O_RDWR)
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view, Uring() as ring:
        try:
            ring.register(address(view), SIZE)
        except OSError as error:
            assert error.errno in (errno.EOPNOTSUPP, errno.EFAULT), f"refused with {error}"
            print(f"registered buffers are refused with {errno.errorcode[error.errno]}", flush=True)
        else:
            equal(ring.transfer(READ, (source, address(view), 1 << 20, 0)), [1 << 20])
            assert view[: 1 << 20] == data == os.pread(fd, 1 << 20, 0)
    # A buffer elsewhere is always right.
    memory = mmap.mmap(-1, 1 << 20)
    with Uring() as ring:
        ring.register(address(memory), 1 << 20)
        equal(ring.transfer(READ, (source, address(memory), 1 << 20, 0)), [1 << 20])
        equal(ring.transfer(WRITE, (fd, address(memory), 1 << 20, 4096)), [1 << 20])
        assert os.pread(fd, 1 << 20, 4096) == data
        memory[:] = bytes(1 << 20)
        equal(ring.transfer(READ, (fd, address(memory), 1 << 20, 4096)), [1 << 20])
        assert memory[:] == data
    os.close(fd)
    os.close(source)


def past_what_is_mapped():
    """Transfers that cross the end of the mapped part, or meet a revocation, are whole."""
    path, larger = make("crossing"), 12 << 20
    fd = os.open(path, os.O_RDWR)
    assert os.pread(fd, SIZE, 0) == pattern(SIZE)
    host(f"head -c {larger - SIZE} /dev/zero | tr '\\0' h >>crossing")
    seen("the host's append", lambda: os.fstat(fd).st_size, larger)
    due = pattern(SIZE) + b"h" * (larger - SIZE)
    memory = mmap.mmap(-1, larger)
    for start in Aio, Uring:
        with start() as engine:
            memory[:] = bytes(larger)
            equal(engine.transfer(READ, (fd, address(memory), larger, 0)), [larger])
            assert memory[:] == due, f"{start.__name__} reads other bytes"
            # A write that begins in the mapped part and makes the file longer.
            memory[:] = due
            equal(engine.transfer(WRITE, (fd, address(memory), larger, 1 << 20)), [larger])
            equal(os.fstat(fd).st_size, larger + (1 << 20))
            assert read(path) == due[: 1 << 20] + due, f"{start.__name__} writes other bytes"
            os.ftruncate(fd, larger)
            write(path, due, flags=os.O_WRONLY)
            # The host takes the file away again and again.
            stop = f"{MEET}/stop"
            host("(while [ -d ../meet ] && [ ! -e ../meet/stop ]; do fallocate -p -o 8M -l 4k crossing; done; rm ../meet/stop) >/dev/null 2>&1 &")
            for _ in range(30):
                equal(engine.transfer(READ, *[(fd, address(memory), 2 << 20, n << 20) for n in range(4)]), [2 << 20] * 4)
                equal(engine.transfer(WRITE, (fd, address(memory), 4096, 10 << 20)), [4096])
            write(stop, b"")
            while os.path.exists(stop):
                time.sleep(0.01)
            write(path, due, flags=os.O_WRONLY)
    os.close(fd)
    os.unlink(path)


def without_waiting():
    """RWF_NOWAIT reads and writes what is mapped."""
    path = make("nowait")
    fd = os.open(path, os.O_RDWR)
    # Each page is there.
    os.pread(fd, SIZE, 0)
    os.pwrite(fd, b"warm", 4096)
    buffer = bytearray(8192)
    equal(os.preadv(fd, [buffer], 0, os.RWF_NOWAIT), 8192)
    assert buffer == pattern(4096) + b"warm" + pattern(8192)[4100:]
    try:
        os.setxattr(path, "user.test", b"")
    except OSError:
        equal(os.pwritev(fd, [b"now"], 4096, os.RWF_NOWAIT), 3)
        equal(os.pread(fd, 4, 4096), b"nowm")
    else:
        # With extended attributes, and a DAX window that rules out FUSE_HANDLE_KILLPRIV_V2, each write first asks for
        # security.capability.
        refused(errno.EAGAIN, os.pwritev, fd, [b"now"], 4096, os.RWF_NOWAIT)
    os.close(fd)


def appended():
    """RWF_APPEND writes to the end that the host knows."""
    path = make("appended")
    due = bytearray(pattern(SIZE))
    fd = os.open(path, os.O_RDWR)
    os.pread(fd, SIZE, 0)
    for turn in range(10):
        equal(os.pwritev(fd, [b"guest %d" % turn], 0, os.RWF_APPEND), 7)
        host(f"printf 'host {turn}' >>appended")
        due += b"guest %dhost %d" % (turn, turn)
    equal(os.pwritev(fd, [b"end"], 0, os.RWF_APPEND), 3)
    equal(on_host("appended"), digest(due + b"end"))
    equal(os.fstat(fd).st_size, len(due) + 3)
    assert read(path) == due + b"end"
    os.close(fd)
    # Two processes append at the same time: nothing is overwritten.
    fd = os.open(path, os.O_RDWR | os.O_TRUNC)
    os.posix_fallocate(fd, 0, 4096)
    rounds = 200

    def appends(letter):
        def append():
            if turns[0] < rounds:
                equal(os.pwritev(fd, [letter * 100], 0, os.RWF_APPEND), 100)
                turns[0] += 1

        turns = [0]
        return Busy(append, f"appends {letter}")

    with appends(b"a") as one, appends(b"b") as other:
        while one.rounds() < rounds or other.rounds() < rounds:
            time.sleep(0.01)
    got = read(path)[4096:]
    equal((len(got), got.count(b"a" * 100), got.count(b"b" * 100)), (200 * rounds, rounds, rounds))
    os.close(fd)


def spliced():
    path = make("spliced")
    due = pattern(SIZE)
    fd, target = os.open(path, os.O_RDWR), os.open("/tmp/target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    at = 0
    while at < SIZE:
        at += os.sendfile(target, fd, at, SIZE - at)
    assert read("/tmp/target") == due, "sendfile"
    reader, writer = os.pipe()
    equal(os.splice(fd, writer, 5000, offset_src=100), 5000)
    got = b""
    while len(got) < 5000:
        got += os.read(reader, 5000)
    equal(got, due[100:5100])
    equal(os.write(writer, b"spliced"), 7)
    equal(os.splice(reader, fd, 7, offset_dst=4093), 7)
    equal(os.pread(fd, 7, 4093), b"spliced")
    equal(os.copy_file_range(fd, fd, 4096, 4093, 1 << 20), 4096)
    equal(os.pread(fd, 7, 1 << 20), b"spliced")
    equal(host("dd if=spliced bs=1 skip=4093 count=7 status=none"), "spliced")
    for descriptor in fd, target, reader, writer:
        os.close(descriptor)


def sizes():
    path = make("sizes")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        assert view[2 << 20] == pattern(SIZE)[2 << 20]
        os.ftruncate(fd, 1 << 20)
        equal((os.fstat(fd).st_size, os.pread(fd, 10, 1 << 20)), (1 << 20, b""))
        pid = os.fork()
        if pid == 0:
            view[2 << 20]
            os._exit(0)
        equal(os.WTERMSIG(os.waitpid(pid, 0)[1]), signal.SIGBUS)
        os.ftruncate(fd, SIZE)
        assert view[1 << 20 :] == bytes(SIZE - (1 << 20)), "zeroes after growth"
    os.ftruncate(fd, 5000)
    with mapped(path, 5000, writable=True) as view:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)) + 5000, ord("y"), 10)
    os.ftruncate(fd, 8192)
    equal(os.pread(fd, 20, 5000), bytes(20))
    appender = os.open(path, os.O_WRONLY | os.O_APPEND)
    equal(os.write(appender, b"end"), 3)
    os.close(appender)
    equal((os.fstat(fd).st_size, os.pread(fd, 10, 8190)), (8195, b"\0\0end"))
    os.pwrite(fd, b"beyond", 100_000)
    equal((os.fstat(fd).st_size, os.pread(fd, 8, 99_998)), (100_006, b"\0\0beyond"))
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    equal((os.fstat(fd).st_size, os.pread(fd, 1, 0)), (0, b""))
    os.pwrite(fd, b"again", 0)
    equal((read(path), host("cat sizes")), (b"again", "again"))
    os.posix_fallocate(fd, 0, 70_000)
    equal(os.fstat(fd).st_size, 70_000)
    # Grow by far more than the spare room of the slot.
    os.ftruncate(fd, 40 << 20)
    os.pwrite(fd, b"far", 39 << 20)
    equal(os.pread(fd, 3, 39 << 20), b"far")
    with mapped(path, 40 << 20, writable=True) as view:
        equal(view[39 << 20 : (39 << 20) + 3], b"far")
        view[39 << 20] = ord("F")
    equal(host_number("stat -c %s sizes"), 40 << 20)
    equal(os.pread(fd, 3, 39 << 20), b"Far")
    os.close(fd)


def as_large_as_the_window():
    """A file outgrows its slot until nothing else fits into the window."""
    fd = os.open(f"{S}/large", os.O_RDWR | os.O_CREAT)
    piece = pattern(RANGE)
    # The smaller of the two windows has 128 MiB, less the table.
    size = 120 << 20
    for at in range(0, size, RANGE):
        os.pwrite(fd, piece, at)
    with mapped(f"{S}/large", size, writable=True) as view:
        for at in (size - 8, size // 2, 0):
            equal(view[at : at + 8], (piece * 2)[at % RANGE : at % RANGE + 8])
            view[at] = 1
    os.close(fd)
    os.unlink(f"{S}/large")


def truncated_by_another_name():
    """A file is truncated by a name that the guest does not know yet, while it is mapped by another name."""
    path = make("one")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        assert view[:] == pattern(SIZE)
        assert not os.path.exists(f"{S}/two")
        host("ln one two")
        # O_CREAT without a lookup: the guest believes that the name is free.
        other = os.open(f"{S}/two", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        equal((os.fstat(fd).st_size, os.fstat(other).st_ino), (0, os.fstat(fd).st_ino))
        pid = os.fork()
        if pid == 0:
            view[SIZE - 1]
            os._exit(0)
        equal(os.WTERMSIG(os.waitpid(pid, 0)[1]), signal.SIGBUS)
        os.close(other)
    os.close(fd)


def holes():
    path = make("holes")
    due = bytearray(pattern(SIZE))
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        assert view[1 << 20] == due[1 << 20]
        # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        call("fallocate", fd, 3, ctypes.c_long(1 << 20), ctypes.c_long(1 << 20))
        due[1 << 20 : 2 << 20] = bytes(1 << 20)
        assert view[:] == due, "the mapping does not show the hole"
        equal(os.lseek(fd, 0, os.SEEK_HOLE), 1 << 20)
        equal(os.lseek(fd, 1 << 20, os.SEEK_DATA), 2 << 20)
        # Write into the hole: by a message, and by a fault that fills it.
        os.pwrite(fd, b"written", 1 << 20)
        view[(1 << 20) + 8192 : (1 << 20) + 8198] = b"stored"
    due[1 << 20 : (1 << 20) + 7] = b"written"
    due[(1 << 20) + 8192 : (1 << 20) + 8198] = b"stored"
    equal(on_host("holes"), digest(due))
    os.close(fd)


def times():
    path = make("times")
    fd = os.open(path, os.O_RDWR)

    def moves(what, act):
        before = os.fstat(fd)
        time.sleep(0.05)
        act()
        after = os.fstat(fd)
        assert after.st_mtime_ns > before.st_mtime_ns, f"mtime stays at {what}"
        assert after.st_ctime_ns > before.st_ctime_ns, f"ctime stays at {what}"

    moves("a write", lambda: os.pwrite(fd, b"1", 0))
    with mapped(path, SIZE, writable=True) as view:
        moves("a store", lambda: view.__setitem__(0, 1))
        view.flush()
        moves("a store after msync", lambda: view.__setitem__(0, 2))
    kept = os.fstat(fd).st_mtime_ns
    os.fsync(fd)
    equal(os.stat(path).st_mtime_ns, kept)
    # The host never moves back a time that its own clock set for a store. A guest's clock may be seconds late.
    on_host = int(host("stat -c %.9Y times").strip().replace(".", ""))
    assert 0 <= on_host - kept < 5 * 10**9, f"{on_host} on the host, expected {kept}"
    os.utime(path, (1, 1))
    equal(os.stat(path).st_mtime_ns, 10**9)
    equal(host_number("stat -c %Y times"), 1)
    moves("a write after utime", lambda: os.pwrite(fd, b"2", 1))
    os.close(fd)


def host_times(name):
    """mtime and ctime in nanoseconds, as a process of the host sees them."""
    return tuple(int(time.replace(".", "")) for time in host(f"stat -c '%.9Y %.9Z' {name}").split())


def times_and_requests():
    """What the guest has written in place moves mtime and ctime, whatever request comes next."""
    path = make("moved")
    fd = os.open(path, os.O_RDWR)

    def both():
        found = os.fstat(fd)
        return found.st_mtime_ns, found.st_ctime_ns

    def moves(what, act):
        # Both stores: by write(2), and through a mapping.
        for store in lambda: os.pwrite(fd, b"new", 4096), lambda: view.__setitem__(8192, 1):
            before = both()
            # More than a tick of the host's clock.
            time.sleep(0.02)
            store()
            act()
            after = both()
            assert after[0] > before[0], f"mtime stays at a store and {what}"
            assert after[1] > before[1], f"ctime stays at a store and {what}"
            equal(host_times("moved"), after)
            view.flush()

    def link():
        os.link(path, f"{path}-link")
        os.unlink(f"{path}-link")

    def failing():
        """Requests that fail."""
        as_user(1000, 1000, [], lambda: refused(errno.EPERM, os.utime, path, (1, 1)))
        refused(errno.EFBIG, os.truncate, path, (1 << 63) - 1)

    def reopen():
        with open(path, "rb") as again:
            again.read(10)

    with mapped(path, SIZE, writable=True) as view:
        assert view[:] == pattern(SIZE)
        moves("fchmod", lambda: os.fchmod(fd, 0o600))
        moves("fchown", lambda: os.fchown(fd, 1, 1))
        moves("a read", lambda: os.pread(fd, 100, 0))
        moves("link", link)
        moves("open and read", reopen)
        moves("fsync", lambda: os.fsync(fd))
        moves("requests that fail", failing)
        try:
            os.setxattr(path, "user.name", b"1")
        except OSError as error:
            equal(error.errno, errno.EOPNOTSUPP)
        else:
            moves("setxattr", lambda: os.setxattr(path, "user.name", b"2"))
            moves("removexattr", lambda: os.setxattr(path, "user.other", b"") or os.removexattr(path, "user.other"))
        for store in lambda: os.pwrite(fd, b"new", 4096), lambda: view.__setitem__(8192, 2):
            before = both()
            time.sleep(0.02)
            store()
            os.utime(path, ns=(10**9, 2 * 10**9))
            # Nothing brings back the time of the store.
            for act in (lambda: None, lambda: os.pread(fd, 10, 0), lambda: os.fchmod(fd, 0o644), lambda: os.fsync(fd), view.flush, link):
                act()
                equal(both()[0], 2 * 10**9)
            assert both()[1] > before[1], "ctime stays at utimensat"
            equal(host_times("moved")[0], 2 * 10**9)
        # After it the next store counts again, and without a request of the guest the host sees it too.
        before = both()
        view[12288] = 3
        seen_by_host = time.monotonic() + 60
        while host_times("moved")[0] <= before[0]:
            assert time.monotonic() < seen_by_host, "the host never sees the time of a store"
            time.sleep(0.1)
    os.close(fd)


def set_id_bits():
    path = make("setid", b"x" * 8192)
    os.chmod(path, 0o6777)

    def someone():
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, b"z", 0)
        assert os.fstat(fd).st_mode & 0o6000 == 0

    as_user(1000, 1000, [], someone)
    equal(os.stat(path).st_mode & 0o6000, 0)
    equal(host("stat -c %a setid").strip(), "777")


def durable():
    """O_SYNC and O_DSYNC writes, and each sync call, return only after the data reached the host's file system."""
    for flag in os.O_SYNC, os.O_DSYNC:
        before = asked("FSYNC", "WRITE")
        fd = os.open(make("durable"), os.O_RDWR | flag)
        os.pwrite(fd, b"durable", 0)
        os.close(fd)
        assert asked("FSYNC", "WRITE") > before, "a synchronous write is not synced"
    path = f"{S}/durable"
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        for what, sync in (
            ("fsync", lambda: os.fsync(fd)),
            ("fdatasync", lambda: os.fdatasync(fd)),
            ("msync", view.flush),
        ):
            before = asked("FSYNC")
            os.pwrite(fd, what.encode(), 4096)
            sync()
            assert asked("FSYNC") > before, f"{what} sends no FSYNC"
        # SYNC_FILE_RANGE_WRITE may do nothing, but must not fail.
        call("sync_file_range", fd, ctypes.c_long(0), ctypes.c_long(SIZE), 2)
    os.close(fd)


def executed():
    subprocess.run(["cp", "/usr/bin/busybox", f"{S}/program"], check=True)
    os.chmod(f"{S}/program", 0o755)
    for _ in range(5):
        equal(subprocess.run(["busybox", "echo", "ran"], executable=f"{S}/program", capture_output=True).stdout, b"ran\n")
    running = subprocess.Popen(["busybox", "sleep", "60"], executable=f"{S}/program")
    time.sleep(0.5)
    refused(errno.ETXTBSY, os.open, f"{S}/program", os.O_WRONLY)
    running.kill()
    running.wait()
    host("bash -c 'exec -a busybox ./program echo hello'")


def locked():
    path = make("locked", b"x" * 4096)
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX)

    def other():
        mine = os.open(path, os.O_RDWR)
        refused(errno.EAGAIN, fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB)

    in_child(other)
    os.close(fd)


def unlinked():
    path = make("unlinked")
    fd = os.open(path, os.O_RDWR)
    with mapped(path, SIZE, writable=True) as view:
        os.unlink(path)
        view[0:5] = b"still"
        equal(os.pread(fd, 5, 0), b"still")
        os.ftruncate(fd, 2 * SIZE)
        os.pwrite(fd, b"here", 2 * SIZE - 4)
        equal(os.pread(fd, 4, 2 * SIZE - 4), b"here")
    os.close(fd)
    assert not os.path.exists(path)


def many_files():
    """More files than slots: the rest is read by messages."""
    names = [f"{S}/many-{number}" for number in range(400)]
    for number, name in enumerate(names):
        write(name, pattern(9000, number))
    fds = [os.open(name, os.O_RDWR) for name in names]
    for number, fd in enumerate(fds):
        assert os.pread(fd, 10_000, 0) == pattern(9000, number)
        os.pwrite(fd, b"changed", 0)
    for number, (fd, name) in enumerate(zip(fds, names)):
        os.close(fd)
        equal(read(name), b"changed" + pattern(9000, number)[7:])
        os.unlink(name)


def remounted():
    path = make("remounted")
    umount("s")
    mount("s")
    assert read(path) == pattern(SIZE)
    fd = os.open(path, os.O_RDWR)
    before = asked(*IO)
    assert os.pread(fd, SIZE, 0) == pattern(SIZE)
    equal(asked(*IO), before)
    os.close(fd)


def unmounted_with_a_page_in_a_pipe():
    """umount(8) does not wait for the pipe. The page keeps its contents until the pipe is read."""
    path = make("late")
    with mapped(path, SIZE, writable=True) as view:
        reader, writer = page_in_a_pipe(view)
    umount("s")
    mount("s")
    write(f"{S}/other", pattern(SIZE, 2))
    equal(read(f"{S}/other"), pattern(SIZE, 2))
    equal(os.read(reader, 4096), pattern(4096))
    equal(read(path), pattern(SIZE))
    os.close(reader)
    os.close(writer)


mount("meet")
mount("s")
parts = (
    (read_and_written,),
    (mapped_every_way,),
    (buffers_in_the_window,),
    (pages_in_a_pipe,),
    (truncated_while_in_use,),
    (growth_past_a_pinned_page,),
    (asynchronous,),
    (registered,),
    (past_what_is_mapped,),
    (without_waiting,),
    (appended,),
    (spliced,),
    (sizes,),
    (as_large_as_the_window,),
    (truncated_by_another_name,),
    (holes,),
    (set_id_bits,),
    (durable,),
    (executed,),
    (locked,),
    (unlinked,),
    (many_files,),
    (remounted,),
    (unmounted_with_a_page_in_a_pipe,),
    (times,),
    (times_and_requests,),
)
steps(*[part for part in parts if not sys.argv[1:] or part[0].__name__ in sys.argv[1:]])
umount("s")
umount("meet")
