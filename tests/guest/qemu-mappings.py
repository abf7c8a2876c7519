#!/usr/bin/python3
"""Touches more of each file than QEMU can map: qemu-mappings.py SHARE... Being refused is right, and ends nothing."""

import os
import signal
import sys

sys.path.insert(0, "/host")
from window import *

RANGES = 256
children = []
for share in sys.argv[1:]:
    mount(share, "always")
    sys.stdout.flush()
    done = mmap.mmap(-1, mmap.PAGESIZE)
    children.append(os.fork())
    if not children[-1]:
        # It stays, with its mappings, while the next share is used. A refusal is SIGBUS.
        with mapped(f"/mnt/{share}/file", RANGES * RANGE) as view:
            for number in range(RANGES):
                equal(view[number * RANGE], 0)
                done[:4] = (number + 1).to_bytes(4, "little")
            done[4] = 1
            time.sleep(3600)
    while not done[4] and not os.waitid(os.P_PID, children[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.1)
    print(f"share {share}: {int.from_bytes(done[:4], 'little')} of {RANGES} parts could be touched", flush=True)
# The host counts what QEMU has mapped.
print("full", flush=True)
while not os.path.exists(f"/mnt/{sys.argv[1]}/counted"):
    time.sleep(0.1)
# Once files are let go of, others can be mapped.
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
drop_caches()
for share in sys.argv[1:]:
    fd = os.open(f"/mnt/{share}/new", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    equal(read(f"/mnt/{share}/small"), b"text\n")
