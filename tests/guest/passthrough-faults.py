#!/usr/bin/python3
"""Works on passed-through files while tests/host/faults.py makes faults: passthrough-faults.py honest|flips SEED.

Prints "ready" when it works, and ends when the host creates "stop" in the share "meet". honest: each byte is checked, and no error
may occur, except at files that the host truncates and after "killing" appeared. flips: the table lies, so that any contents and some
errors are right. All processes must end, or can be killed."""

import errno
import mmap
import os
import random
import resource
import signal
import sys
import time

sys.path.insert(0, "/host")
from cells import *
from window import *

mode, seed = sys.argv[1], int(sys.argv[2])
flips = mode == "flips"
SIZE = 2 << 20
PLAIN = [f"plain-{number}" for number in range(1, 7)]
# The host truncates and extends them.
CUT = [f"cut-{number}" for number in range(1, 4)]
NUMBERS = {name: number for number, name in enumerate(PLAIN + CUT, 1)}
WORKERS = 3
PART = SIZE // (WORKERS + 1)
# What an access may fail with when the table lies, or the daemon is dead. EFAULT is SIGBUS within a system call.
ALLOWED = (errno.EIO, errno.EFAULT, errno.ENOTCONN)
# Byte 0 ends the workers. From byte 8 on, each worker has a counter of rounds.
control = mmap.mmap(-1, mmap.PAGESIZE)
rounds = memoryview(control).cast("Q")


class Wrong(Exception):
    """Contents that must not be."""


class Worker:
    """Each one alone writes to its part of the plain files, and knows what is there."""

    def __init__(self, which):
        self.which, self.version = which, 0
        self.rng = random.Random(f"{seed} {which} {os.getpid()}")
        self.part = range(which * PART, (which + 1) * PART)
        self.views, self.shadow = [], {}
        self.scratch = os.memfd_create("scratch")
        self.created = 0
        for name in PLAIN:
            with open(f"{S}/{name}", "rb", buffering=0) as file:
                self.shadow[name] = bytearray(os.pread(file.fileno(), PART, self.part.start))
                self.check(name, self.part.start, self.shadow[name])

    def check(self, name, at, data, holes=False):
        found = None if flips else foreign(data, NUMBERS[name], at, holes)
        if found:
            raise Wrong(f"{name}: {found}")

    def check_plain(self, name, at, data, length):
        if flips:
            return
        if len(data) != length:
            raise Wrong(f"{name}: {len(data)} of {length} bytes at {at:#x}")
        self.check(name, at, data)
        low, high = max(at, self.part.start), min(at + length, self.part.stop)
        if low < high and data[low - at : high - at] != self.shadow[name][low - self.part.start : high - self.part.start]:
            raise Wrong(f"{name}: a store of its own is lost between {low:#x} and {high:#x}")

    def fresh(self, name, longest):
        """Contents for a place of its own part."""
        self.version += 1
        count = self.rng.choice((1, 8, 512, longest // CELL))
        at = self.part.start + self.rng.randrange(PART // CELL - count + 1) * CELL
        return at, cells(NUMBERS[name], at, count, self.version)

    def wrote(self, name, at, data):
        start = at - self.part.start
        self.shadow[name][start : start + len(data)] = data

    def read(self, name, fd):
        length = self.rng.choice((1, 100, 4096, 10_000))
        at = self.rng.randrange(SIZE - length)
        self.check_plain(name, at, os.pread(fd, length, at), length)

    def write(self, name, fd):
        at, data = self.fresh(name, 16384)
        done = os.pwrite(fd, data, at)
        if not flips and done != len(data):
            raise Wrong(f"{name}: {done} of {len(data)} bytes written at {at:#x}")
        self.wrote(name, at, data)

    def load(self, name, view):
        for _ in range(4):
            length = self.rng.choice((8, 64, 4096))
            at = self.rng.randrange(0, SIZE - length)
            self.check_plain(name, at, view[at : at + length], length)

    def store(self, name, view):
        at, data = self.fresh(name, 4096)
        view[at : at + len(data)] = data
        self.wrote(name, at, data)

    def plain(self):
        """Reads, writes, maps and syncs a file that only the guest changes. Some mappings stay."""
        name = self.rng.choice(PLAIN)
        fd = os.open(f"{S}/{name}", os.O_RDWR)
        for _ in range(self.rng.randrange(1, 6)):
            self.rng.choice((self.read, self.write))(name, fd)
        if self.rng.randrange(2):
            self.views.append((name, mmap.mmap(fd, SIZE)))
        if self.rng.randrange(4) == 0:
            self.rng.choice((os.fsync, os.fdatasync))(fd)
        os.close(fd)
        self.mapped()
        if len(self.views) > 3:
            name, view = self.views.pop(self.rng.randrange(4))
            if self.rng.randrange(2):
                view.flush()
            view.close()

    def mapped(self):
        for name, view in self.views:
            self.rng.choice((self.load, self.store))(name, view)

    def held(self):
        """Uses what was opened and mapped before."""
        if not self.views:
            self.files = [(name, os.open(f"{S}/{name}", os.O_RDWR)) for name in PLAIN[:2]]
            self.views = [(name, mmap.mmap(fd, SIZE)) for name, fd in self.files]
        for name, fd in self.files:
            self.rng.choice((self.read, self.write))(name, fd)
        self.mapped()

    def cut(self):
        """Uses a file that the host and the guest truncate and extend. System calls touch its mapping: they give EFAULT for SIGBUS."""
        name = self.rng.choice(CUT)
        fd = os.open(f"{S}/{name}", os.O_RDWR)
        try:
            for _ in range(3):
                size = os.fstat(fd).st_size
                length = self.rng.choice((8, 4096, 10_000))
                at = self.rng.randrange(size + 1) & -CELL
                how = self.rng.randrange(7)
                if how <= 1:
                    self.check(name, at, os.pread(fd, length, at), True)
                elif how == 2:
                    length = min(length, size - at)
                    os.pwrite(fd, cells(NUMBERS[name], at, length // CELL, 1), at)
                elif how <= 4 and length <= size - at:
                    self.through_mapping(name, fd, at, length // CELL, how == 4)
                elif how == 5 and self.rng.randrange(4) == 0:
                    os.ftruncate(fd, self.rng.randrange(SIZE))
                elif how == 6:
                    try:
                        os.fsync(fd)
                    except OSError as error:
                        # The guest was too late for a truncation of the host: stores may be lost.
                        if error.errno != errno.EIO:
                            raise
        finally:
            os.close(fd)

    def through_mapping(self, name, fd, at, count, store):
        try:
            view = mmap.mmap(fd, at + count * CELL)
        except ValueError:
            return  # The file is shorter by now.
        os.pwrite(self.scratch, cells(NUMBERS[name], at, count, 2), 0)
        try:
            with view, memoryview(view) as octets:
                if store:
                    os.preadv(self.scratch, [octets[at:]], 0)
                else:
                    done = os.pwrite(self.scratch, octets[at:], 0)
                    self.check(name, at, os.pread(self.scratch, done, 0), True)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise

    def own(self):
        """Creates, uses and removes a file, so that slots go from one file to another."""
        self.created += 1
        number = 1000 * (self.which + 1) + self.created % 1000
        name, size = f"own-{self.which}-{self.created}", self.rng.randrange(CELL, 1 << 18, CELL)
        data = cells(number, 0, size // CELL)
        write(f"{S}/{name}", data)
        fd = os.open(f"{S}/{name}", os.O_RDWR)
        if self.rng.randrange(2):
            os.unlink(f"{S}/{name}")
        with mmap.mmap(fd, size) as view:
            if view[:] != data or os.pread(fd, size, 0) != data:
                raise Wrong(f"{name}: {foreign(view[:], number, 0) or foreign(os.pread(fd, size, 0), number, 0) or 'its size'}")
        os.close(fd)
        if os.path.exists(f"{S}/{name}"):
            os.unlink(f"{S}/{name}")

    def run(self):
        if self.which == WORKERS:
            actions = [self.held]
        else:
            actions = [self.plain] if flips else [self.plain, self.plain, self.cut, self.cut, self.own]
        while not control[0]:
            self.rng.choice(actions)()
            rounds[1 + self.which] += 1


def start(which):
    """Statuses: 0 as it should be, 1 wrong, 3 an error of a kind that may be allowed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        Worker(which).run()
        status = 0
    except Wrong as wrong:
        print(f"WRONG worker {which}: {wrong}", flush=True)
    except OSError as error:
        status = 3 if error.errno in ALLOWED else 1
        if not flips or status == 1:
            print(f"worker {which}, round {rounds[1 + which]}: {where(error)}", flush=True)
    except BaseException as error:
        # mmap.mmap() finds the file too short for its mapping.
        status = 3 if flips and isinstance(error, ValueError) else 1
        if status == 1:
            print(f"worker {which}: {where(error)}", flush=True)
    os._exit(status)


def where(error):
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (line {line.lineno}: {line.line})"


def ended(status):
    """Whether a worker may end so."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return True
    allowed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 3 or os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS
    return allowed and (flips or os.path.exists(f"{MEET}/killing"))


def stack(pid):
    with open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    try:
        return f"{state}: " + read(f"/proc/{pid}/stack").decode().replace("\n", " ")
    except OSError:
        return state


def reap(workers, seconds):
    """Waits until they end, and returns those that have not."""
    deadline = time.monotonic() + seconds
    while workers and time.monotonic() < deadline:
        for pid in list(workers):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                which = workers.pop(pid)
                assert ended(status) or status == signal.SIGKILL, f"worker {which} ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    return workers


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
mount("meet")
mount("s")
for name in PLAIN if flips else PLAIN + CUT:
    write(f"{S}/{name}", cells(NUMBERS[name], 0, SIZE // CELL))
workers = {start(which): which for which in range(WORKERS + 1)}
again = 0
while not all(rounds[1 + which] for which in range(WORKERS + 1)):
    assert not os.waitpid(-1, os.WNOHANG)[0], "a worker ended before the first fault"
    time.sleep(0.1)
print("ready", flush=True)
while not os.path.exists(f"{MEET}/stop") and not os.path.exists(f"{MEET}/killed"):
    pid, status = os.waitpid(-1, os.WNOHANG) if workers else (0, 0)
    if pid:
        which = workers.pop(pid)
        assert ended(status), f"worker {which} ended with {os.waitstatus_to_exitcode(status)} in round {rounds[1 + which]}"
        if flips:
            workers[start(which)] = which
            again += 1
    time.sleep(0.05)
worked = [rounds[1 + which] for which in range(WORKERS + 1)]
if os.path.exists(f"{MEET}/killed"):
    # 3 s: a worker that needs the daemon waits for ever. The others go on with what is mapped.
    workers = reap(workers, 3)
    more = [rounds[1 + which] - before for which, before in enumerate(worked)]
    print(f"rounds until the daemon was killed: {worked}, later: {more}", flush=True)
    print("survived", flush=True)
    time.sleep(1000)
control[0] = 1
# 60 s: a round takes a moment, even on a busy machine. After lies about an acknowledgement, some wait for ever.
left = reap(workers, 10 if flips else 60)
for pid, which in left.items():
    print(f"worker {which} does not end: {stack(pid)}", flush=True)
    os.kill(pid, signal.SIGKILL)
stuck = reap(dict(left), 30)
assert not stuck, f"cannot be killed: {[stack(pid) for pid in stuck]}"
assert flips or not left, "some did not end by themselves"
print(f"note: rounds {worked}, {again} ended by errors", flush=True)
umount("s")
umount("meet")
