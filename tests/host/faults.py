#!/usr/bin/env python3
"""Makes faults from outside while a guest works on passed-through files (tests/guest/passthrough-faults.py).

faults.py KIND --seed N --faults N --daemon PID[,PID]... --guest PID --share DIRECTORY [--kill DIRECTORY]
  stops: the daemon or QEMU stops and continues, the host truncates and extends the files cut-*
  flips: entries of the backing table change (docs/protocol.md)
With --kill the daemon is killed after half of the faults or more. The files "killing" and "killed" in the directory tell the guest.
faults.py check --share DIRECTORY: fails if a file has a byte that belongs elsewhere
The seed decides which faults come in which order."""

import argparse
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "guest"))
from cells import cells, foreign

SIZE = 2 << 20
PLAIN, CUT = 6, 3
# Fields of an entry: offset and width.
SEQ, FLAGS, OFFSET, LENGTH, SIZE_FIELD, NODEID, CHANGE, GENERATION, LOST = (
    (0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 4)
)  # fmt: skip
VALID, REVOKED = 1, 4
REVOCATIONS = 24
# A stop that outlasts the 1.5 s within which the guest must acknowledge a revocation.
LONG = (1.6, 2.1)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("stops", "flips", "check"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--daemon", type=lambda text: [int(pid) for pid in text.split(",")], default=[])
    parser.add_argument("--guest", type=int)
    parser.add_argument("--share", type=Path, required=True)
    parser.add_argument("--kill", type=Path)
    return parser.parse_args()


class Stops:
    def __init__(self, given, rng):
        self.guest, self.share, self.rng = given.guest, given.share, rng
        # Not the window process, which leads a session: stopped, it would stop others, so the daemon's first process kills it then.
        self.daemon = [pid for pid in given.daemon if os.getsid(pid) == os.getsid(given.daemon[0])]
        self.waiting = []

    def stopped(self, pids, seconds):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def change(self):
        """Truncates or extends a file. The guard may hold this for as long as the daemon stands still."""
        number = PLAIN + self.rng.randrange(1, CUT + 1)
        path = self.share / f"cut-{number - PLAIN}"
        how, size, more = self.rng.randrange(3), self.rng.randrange(SIZE), self.rng.randrange(8, 1 << 19, 8)

        def run():
            if how == 0:
                os.truncate(path, size)
                return
            with open(path, "r+b", buffering=0) as file:
                at = file.seek(0, os.SEEK_END) if how == 1 else size // 2
                file.seek(at & -8)
                file.write(cells(number, at & -8, more // 8))

        thread = threading.Thread(target=run)
        thread.start()
        self.waiting.append(thread)

    def fault(self, **_):
        kind = self.rng.choices(("daemon", "one process", "guest", "change", "daemon, long", "guest, long"), (8, 4, 8, 8, 1, 2))[0]
        if kind == "daemon":
            self.stopped(self.daemon, self.rng.uniform(0, 0.05))
        elif kind == "one process":
            self.stopped([self.rng.choice(self.daemon)], self.rng.uniform(0, 0.05))
        elif kind == "guest":
            self.stopped([self.guest], self.rng.uniform(0, 0.05))
        elif kind == "change":
            self.change()
        else:
            before = self.rng.randrange(2)
            if before:
                self.change()
            other = threading.Timer(0.05, self.change)
            other.start()
            self.stopped(self.daemon if kind.startswith("daemon") else [self.guest], self.rng.uniform(*LONG))
            other.join()
        return kind

    def end(self):
        for thread in self.waiting:
            # 60 s: the guard lets a process go on after 2 s.
            thread.join(60)
            assert not thread.is_alive(), "a process of the host still waits to change a file"


class Flips:
    def __init__(self, given, rng):
        self.rng = rng
        self.table = self.open_table(given.daemon)
        magic, version, entry, self.entries = struct.unpack_from("<8s3I", self.table)
        assert (magic, version, entry) == (b"FUSE_WIN", 2, 64), "another table"

    @staticmethod
    def open_table(pids):
        for pid in pids:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(link).startswith("/memfd:thruway-table"):
                    fd = os.open(link, os.O_RDWR)
                    return mmap.mmap(fd, os.fstat(fd).st_size)
        raise SystemExit("no process of the daemon has the table")

    # Single stores of 4 or 8 bytes, as those of the daemon.
    def get(self, index, field):
        at, width = field
        with memoryview(self.table).cast("I" if width == 4 else "Q") as words:
            return words[(64 * index + at) // width]

    def put(self, index, field, value):
        at, width = field
        with memoryview(self.table).cast("I" if width == 4 else "Q") as words:
            words[(64 * index + at) // width] = value % (1 << 8 * width)

    def live(self):
        return [index for index in range(1, self.entries) if self.get(index, FLAGS) & (VALID | REVOKED) == VALID]

    def lie(self, index, late):
        """Fields with other values. Each file has SIZE bytes in every slot, so that no lie leads QEMU past the end of a file, which
        would be a SIGBUS there."""
        rng, others = self.rng, [other for other in self.live() if other != index] or [index]
        other = rng.choice(others)
        far = rng.choice((1 << 40, (1 << 64) - (2 << 20), rng.getrandbits(64) | 1 << 50))
        field = rng.choice((OFFSET, OFFSET, LENGTH, LENGTH, NODEID, GENERATION, FLAGS, SIZE_FIELD, SIZE_FIELD, CHANGE, LOST, None))
        if field == OFFSET:
            return {OFFSET: rng.choice((self.get(other, OFFSET), far, 1 << 63))}
        if field == LENGTH:
            return {LENGTH: rng.choice((0, 65536 * rng.randrange(1, 32), self.get(index, LENGTH) * 2, 1 << 62, 4097, far))}
        if field == NODEID:
            return {NODEID: rng.choice((self.get(other, NODEID), 0, 1, rng.getrandbits(64)))}
        if field == GENERATION:
            return {GENERATION: rng.choice((self.get(index, GENERATION) + rng.choice((-1, 1)), 0, rng.getrandbits(32)))}
        if field == FLAGS:
            # The guest acknowledges a false REVOKED. Then it waits, until it is killed, for a generation that never comes. So these
            # come late.
            return {FLAGS: rng.choice((rng.randrange(8), rng.getrandbits(32))) & (0xFFFFFFFF if late else ~REVOKED)}
        if field == SIZE_FIELD:
            return rng.choice(({SIZE_FIELD: rng.randrange(SIZE + 1)}, {LENGTH: SIZE, SIZE_FIELD: rng.choice((1 << 62, 1 << 63, 2 * SIZE))}))
        if field in (CHANGE, LOST):
            return {field: self.get(index, field) + rng.randrange(1, 5)}
        # Another file's entry as a whole.
        return {field: self.get(other, field) for field in (OFFSET, LENGTH, SIZE_FIELD, NODEID, GENERATION)}

    def fault(self, late):
        index = self.rng.choice(self.live() or [1])
        told = self.lie(index, late)
        how = self.rng.choices(("as the protocol says", "without seq", "seq stays odd", "any seq"), (5, 2, 2, 1))[0]
        true, seq = {field: self.get(index, field) for field in told}, self.get(index, SEQ)
        if how in ("as the protocol says", "seq stays odd"):
            self.put(index, SEQ, seq + 1)
        for field, value in told.items():
            self.put(index, field, value)
        if how == "as the protocol says":
            self.put(index, SEQ, seq + 2)
        elif how == "any seq":
            self.put(index, SEQ, self.rng.getrandbits(32))
        left = self.get(index, SEQ)
        if self.rng.randrange(2):
            self.put(0, (REVOCATIONS, 4), self.get(0, (REVOCATIONS, 4)) + 1)
        time.sleep(self.rng.uniform(0, 0.1))
        # If the daemon has written the entry meanwhile, it has written all of it.
        if self.get(index, SEQ) == left:
            self.put(index, SEQ, left | 1)
            for field in told:
                self.put(index, field, true[field])
            self.put(index, SEQ, (left | 1) + 1)
        return how

    def end(self):
        pass


def check(share):
    names = [f"plain-{n + 1}" for n in range(PLAIN)] + [f"cut-{n + 1}" for n in range(CUT)]
    for number, name in enumerate(names, 1):
        data = (share / name).read_bytes()
        found = foreign(data, number, 0, name.startswith("cut"))
        assert not found and (len(data) == SIZE or name.startswith("cut")), f"{name}, {len(data)} bytes: {found}"


def main():
    given = arguments()
    if given.kind == "check":
        return check(given.share)
    rng = random.Random(given.seed)
    maker = {"stops": Stops, "flips": Flips}[given.kind](given, rng)
    made = Counter()
    for number in range(rng.randrange(given.faults // 2, given.faults) if given.kill else given.faults):
        os.kill(given.guest, 0)
        made[maker.fault(late=number > 3 * given.faults // 4)] += 1
        time.sleep(rng.uniform(0, 0.1))
    if given.kill:
        maker.change()
        (given.kill / "killing").touch()
        for pid in given.daemon:
            os.kill(pid, signal.SIGKILL)
        (given.kill / "killed").touch()
        made["kill"] += 1
    maker.end()
    print(f"note: {given.kind}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(made.items())))


main()
