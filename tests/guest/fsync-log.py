#!/usr/bin/python3
"""Appends to a log and syncs it, and only then prints that it has, forever: fsync-log.py DIRECTORY."""

import os
import sys
import threading

log = os.open(f"{sys.argv[1]}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def noise():
    """Writes that nobody syncs, so that the guest is killed during some of them."""
    file = os.open(f"{sys.argv[1]}/noise", os.O_WRONLY | os.O_CREAT, 0o644)
    while True:
        os.pwrite(file, b"\xaa" * (1 << 20), 0)


threading.Thread(target=noise, daemon=True).start()
number = 0
while True:
    number += 1
    os.write(log, b"record %06d of the log\n" % number)
    os.fsync(log)
    os.write(1, b"promised %d\n" % number)
