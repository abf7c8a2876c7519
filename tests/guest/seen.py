"""Prints a percentile, in ms, of the time until the guest sees that the host has set the file's modification time to its own
clock's: seen.py DIR MILLISECONDS stat|event PERCENT."""

import ctypes
import os
import select
import struct
import sys
import time

path, seconds, what, percent = os.path.join(sys.argv[1], "seen"), int(sys.argv[2]) / 1000, sys.argv[3], int(sys.argv[4])
# A change of the modification time alone is IN_MODIFY.
IN_MODIFY, IN_ATTRIB = 2, 4
# The host's pause between two changes (bench/xtask/src/guest.rs).
PAUSE = 25_000_000


def host_is_ahead():
    """How many ns the host's clock is ahead of the guest's, too low by the time that a reply takes."""
    probe = path + ".clock"
    open(probe, "w").close()
    ahead = []
    for _ in range(200):
        # Sets the host's present time.
        os.utime(probe)
        now = time.time_ns()
        ahead.append(os.stat(probe).st_mtime_ns - now)
    os.remove(probe)
    return max(ahead)


def looks():
    while True:
        yield os.stat(path).st_mtime_ns
        # A guest that does nothing else: with one CPU, a loop would keep its agent from running.
        time.sleep(0.0005)


def looks_after_events():
    libc = ctypes.CDLL(None, use_errno=True)
    inotify = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(inotify, path.encode(), IN_MODIFY | IN_ATTRIB) < 0:
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    while True:
        # The host changes the file all the time, so events come soon or never.
        if not select.select([inotify], [], [], 1)[0]:
            yield None
            continue
        os.read(inotify, 64 * struct.calcsize("iIII"))
        yield os.stat(path).st_mtime_ns


ahead = host_is_ahead()
delays, last = [], None
deadline = time.monotonic() + seconds
for seen in {"stat": looks, "event": looks_after_events}[what]():
    now = time.time_ns() + ahead
    if seen and last and seen != last:
        # Changes that the guest has not seen one by one count too.
        count = max(round((seen - last) / PAUSE), 1)
        delays += [now - seen + (seen - last) * n // count for n in range(count)]
    last = seen or last
    if time.monotonic() > deadline:
        break
delays.sort()
# Without events: longer than was waited.
print(max(delays[min(len(delays) * percent // 100, len(delays) - 1)], 1000) / 1e6 if delays else seconds * 1000)
