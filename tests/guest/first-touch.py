#!/usr/bin/env python3
"""first-touch.py FILE: microseconds that the first touch of each 2 MiB range by mmap takes, as JSON."""

import json
import mmap
import sys
import time

# What the kernel's DAX maps at once.
RANGE = 2 << 20
# Touched before any is timed, so that as many mappings are live as the target says.
LIVE = 64
# Timed: enough for a median, few enough that not many more mappings are live at its end.
TIMED = 32

with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), (LIVE + TIMED) * RANGE, prot=mmap.PROT_READ)
times = []
for number in range(LIVE + TIMED):
    start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    view[number * RANGE]
    times.append((time.clock_gettime_ns(time.CLOCK_MONOTONIC) - start) / 1000)
print(json.dumps(times[LIVE:]))
