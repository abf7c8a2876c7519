#!/usr/bin/python3
"""Maps a file and continues without the daemon; prints lines until the host kills the guest: dax-alive.py."""

import os
import sys

sys.path.insert(0, "/host")
from window import *

mount("s", "always")
with mapped(f"{S}/file", 16 * RANGE, writable=True) as view:
    for number in range(16):
        view[number * RANGE] = 1
    for turn in range(6000):
        # The mapped ranges stay mapped.
        view[0] = view[15 * RANGE] = turn % 256
        print(f"alive {turn}", flush=True)
        time.sleep(0.1)
