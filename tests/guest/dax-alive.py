#!/usr/bin/python3
"""Maps a file, and lives on without the daemon: dax-alive.py, which says so until the host has heard it."""

import os
import sys

sys.path.insert(0, "/host")
from window import *

mount("s", "always")
with mapped(f"{S}/file", 16 * RANGE, writable=True) as view:
    for number in range(16):
        view[number * RANGE] = 1
    for turn in range(1200):
        # The ranges that are mapped stay so.
        view[0] = view[15 * RANGE] = turn % 256
        print(f"alive {turn}", flush=True)
        time.sleep(0.1)
