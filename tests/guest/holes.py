#!/usr/bin/python3
"""What is stored in a hole of a file is data at once: holes.py DIRECTORY

A process stores in a hole, by a mapping and by write(2). A copy of the file that leaves out the holes has it all."""

import mmap
import os
import sys

directory = sys.argv[1]
SIZE = 8 << 20
AT = 4 << 20


def copy(file):
    """As cp(1) does it: what lies between SEEK_DATA and SEEK_HOLE."""
    result, at = bytearray(SIZE), 0
    while True:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
        except OSError:
            return result
        end = os.lseek(file, at, os.SEEK_HOLE)
        result[at:end] = os.pread(file, end - at, at)
        at = end


def check(what, file, *stored):
    expected = bytearray(SIZE)
    for at, data in stored:
        expected[at:at + len(data)] = data
    if copy(file) != expected:
        sys.exit(f"{what}: the copy is not equal")


def process(what, *arguments):
    """Another process does it, which opens the file anew."""
    pid = os.fork()
    if not pid:
        file = os.open(f"{directory}/file", os.O_RDONLY)
        check(what, file, *arguments)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)


before = os.open(f"{directory}/file", os.O_RDWR | os.O_CREAT)
os.ftruncate(before, SIZE)
os.fsync(before)
memory = mmap.mmap(before, SIZE)
memory[AT:AT + 6] = b"stored"
process("another process, after a store", (AT, b"stored"))
memory[AT + 65536:AT + 65542] = b"stored"
check("the same file, after a store", before, (AT, b"stored"), (AT + 65536, b"stored"))
os.pwrite(before, b"written", 1 << 20)
process("another process, after a write", (1 << 20, b"written"), (AT, b"stored"), (AT + 65536, b"stored"))
print("holes: every copy was equal")
