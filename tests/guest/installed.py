#!/usr/bin/python3
"""A guest of an installed daemon: installed.py DIRECTORY [submount|window]..."""

import mmap
import os
import sys
import time

d, extras = sys.argv[1], sys.argv[2:]


def awaited(path):
    # 60 s: the host needs a moment, on a busy machine seconds.
    for _ in range(600):
        if os.path.exists(path):
            return
        time.sleep(0.1)
    sys.exit(f"{path} did not appear")


with open(f"{d}/from-the-host") as f:
    assert f.read() == "host\n"
with open(f"{d}/from-the-guest", "w") as f:
    f.write("guest\n")
    os.fsync(f.fileno())
if "submount" in extras:
    awaited(f"{d}/below/here")
    assert os.stat(f"{d}/below").st_dev != os.stat(d).st_dev
if "window" in extras:
    with open(f"{d}/mapped", "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        assert m[:5] == b"host\n"
        m[:6] = b"guest\n"
        m.flush()
        with open(f"{d}/is-mapped", "w") as told:
            told.write("mapped\n")
        awaited(f"{d}/looked")
