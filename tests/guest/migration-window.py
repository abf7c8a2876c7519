#!/usr/bin/python3
"""Stores to two files by mmap and write, and compares all that it reads with a model, until stop exists in the share.

migration-window.py SHARE: the files "a" and "b" are there. Prints how far it is, and at the end the files' checksums.
"""

import hashlib
import mmap
import os
import random
import sys
import time

os.chdir(sys.argv[1])
SIZE = 8 << 20
random.seed(1)


class File:
    def __init__(self, name):
        self.name, self.fd = name, os.open(name, os.O_RDWR)
        self.mapped = mmap.mmap(self.fd, SIZE)
        self.model = bytearray(os.pread(self.fd, SIZE, 0))
        assert len(self.model) == SIZE

    def store(self, by_mapping):
        at, value = random.randrange(SIZE - 64), random.randbytes(64)
        if by_mapping:
            self.mapped[at:at + 64] = value
        else:
            assert os.pwrite(self.fd, value, at) == 64
        self.model[at:at + 64] = value

    def check(self, step):
        for read in [lambda at: self.mapped[at:at + 4096], lambda at: os.pread(self.fd, 4096, at)]:
            at = random.randrange(SIZE - 4096)
            assert read(at) == self.model[at:at + 4096], (self.name, at, step)

    def check_all(self):
        assert self.mapped[:] == self.model, self.name
        os.fsync(self.fd)


files = [File("a"), File("b")]
step, longest, last = 0, 0.0, time.monotonic()
while not os.path.exists("stop"):
    step += 1
    for _ in range(20):
        files[0].store(True)
        files[1].store(False)
        for file in files:
            file.check(step)
    if step % 10 == 0:
        for file in files:
            file.check_all()
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    print("step", step, f"at most {longest:.2f} s", flush=True)
    # So that migration of the dirty pages converges.
    time.sleep(0.01)
for file in files:
    file.check_all()
    print("checksum", file.name, hashlib.sha256(file.model).hexdigest(), flush=True)
    file.mapped.close()
    os.close(file.fd)
