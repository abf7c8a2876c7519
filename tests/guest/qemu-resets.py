#!/usr/bin/python3
"""Stores to mapped files, reads and makes files until QEMU resets the machine: qemu-resets.py RESETS, at each boot."""

import os
import struct
import sys

sys.path.insert(0, "/host")
from window import *

RANGES, PAGE = 16, 4096
mount("meet")
boot = sum(name.startswith("boot-") for name in os.listdir(MEET)) + 1
write(f"{MEET}/boot-{boot}", b"")
mount("s", "always")


def words(number, generation):
    """What a page of this number has: its number and a generation, again and again."""
    return struct.pack("<II", number, generation) * (PAGE // 8)


# Before a reset all pages are stored to with generation 2 * boot, then again and again with the next one. A page that was cut off
# in the middle has both.
with mapped(f"{S}/file", RANGES * RANGE, writable=True) as view:
    allowed = {0} if boot == 1 else {2 * boot - 2, 2 * boot - 1}
    for number in range(len(view) // PAGE):
        for got, generation in struct.iter_unpack("<II", view[number * PAGE : (number + 1) * PAGE]):
            if generation not in allowed or (got != number and boot > 1):
                print(f"FAILED boot {boot}, page {number}: {got}, {generation}", flush=True)
                sys.exit(1)
    print(f"ok boot {boot}", flush=True)
    if boot > int(sys.argv[1]):
        sys.exit(0)
    for number in range(len(view) // PAGE):
        view[number * PAGE : (number + 1) * PAGE] = words(number, 2 * boot)
    if not os.fork():
        while True:
            fd = os.open(f"{S}/made", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.pwrite(fd, bytes(3 * RANGE), 0)
            os.pread(fd, 3 * RANGE, 0)
            os.close(fd)
            os.unlink(f"{S}/made")
    write(f"{MEET}/stores-{boot}", b"")
    while True:
        for number in range(len(view) // PAGE):
            view[number * PAGE : (number + 1) * PAGE] = words(number, 2 * boot + 1)
