#!/usr/bin/python3
"""Writes in place and syncs, and only then prints that it has, forever."""

import mmap
import os

SIZE = 4 << 20
fd = os.open("/mnt/s/file", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, bytes(SIZE), 0)
view = mmap.mmap(fd, SIZE)
number = 0
while True:
    number += 1
    # No later record uses this place.
    at, text = number * 64 % SIZE, b"record-%06d" % number
    how = number % 4
    if how == 0:
        os.pwrite(fd, text, at)
        os.fsync(fd)
    elif how == 1:
        os.pwrite(fd, text, at)
        os.fdatasync(fd)
    elif how == 2:
        view[at : at + len(text)] = text
        view.flush()
    else:
        synced = os.open("/mnt/s/file", os.O_RDWR | os.O_DSYNC)
        os.pwrite(synced, text, at)
        os.close(synced)
    os.write(1, b"promised %d %d %s\n" % (number, at, text))
