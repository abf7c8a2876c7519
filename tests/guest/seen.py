"""Prints a percentile, in ms, of the time until the guest sees that the host has set the file's modification time to its own
clock's: seen.py DIR MILLISECONDS stat|event PERCENT."""

import ctypes
import os
import select
import struct
import sys
import time

path, seconds, what, percent = os.path.join(sys.argv[1], "seen"), int(sys.argv[2]) / 1000, sys.argv[3], int(sys.argv[4])
IN_ATTRIB = 4


def changes_by_stat():
    last = os.stat(path).st_mtime_ns
    while True:
        seen = os.stat(path).st_mtime_ns
        yield seen if seen != last else None
        last = seen


def changes_by_event():
    libc = ctypes.CDLL(None, use_errno=True)
    inotify = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(inotify, path.encode(), IN_ATTRIB) < 0:
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    while True:
        # The host changes the file all the time, so events come soon or never.
        if not select.select([inotify], [], [], 1)[0]:
            yield None
            continue
        os.read(inotify, 64 * struct.calcsize("iIII"))
        yield os.stat(path).st_mtime_ns


delays = []
deadline = time.monotonic() + seconds
for changed in {"stat": changes_by_stat, "event": changes_by_event}[what]():
    if changed:
        # User-Mode Linux has the host's clock, give or take less than a µs.
        delays.append(max(time.time_ns() - changed, 1000) / 1e6)
    if time.monotonic() > deadline:
        break
delays.sort()
# Without events: longer than was waited.
print(delays[min(len(delays) * percent // 100, len(delays) - 1)] if delays else seconds * 1000)
