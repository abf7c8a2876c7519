#!/usr/bin/env python3
"""Prints the microseconds that the first touch of each of RANGES ranges of 2 MiB takes, as JSON:
first-touch.py FILE RANGES."""

import json
import mmap
import sys
import time

# The kernel's DAX maps this many bytes at once.
RANGE = 2 << 20
# Touched before the measurement, so that this many mappings are live.
LIVE = 64

with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
times = []
for at in range(0, min(int(sys.argv[2]) * RANGE, len(view)), RANGE):
    start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    view[at]
    times.append((time.clock_gettime_ns(time.CLOCK_MONOTONIC) - start) / 1000)
print(json.dumps(times[LIVE:]))
