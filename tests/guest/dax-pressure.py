#!/usr/bin/python3
"""A working set larger than the window: dax-pressure.py MODE RANGES SMALL-FILES SECONDS [STEP]..."""

import os
import random
import sys

sys.path.insert(0, "/host")
from window import *

mode = sys.argv[1]
ranges, small, seconds = map(int, sys.argv[2:5])
only = sys.argv[5:]
rng = random.Random(11)
# More ranges than the window has, and more files than a process usually has.
HELD = 300


def stamp(number):
    return b"%08d" % number


def tell(number, what):
    """Prints progress: a step may take minutes."""
    if number % 256 == 255:
        print(f"{number + 1} {what}", flush=True)


def working_set():
    """Writes all ranges in one order and reads them in another."""
    path = f"{S}/large"
    host(f"truncate -s {ranges * RANGE} large")
    at = [number * RANGE + rng.randrange(RANGE - 8) for number in range(ranges)]
    with mapped(path, ranges * RANGE, writable=True) as view:
        for done, number in enumerate(rng.sample(range(ranges), ranges)):
            view[at[number] : at[number] + 8] = stamp(number)
            tell(done, "written")
        for done, number in enumerate(rng.sample(range(ranges), ranges)):
            equal((number, view[at[number] : at[number] + 8]), (number, stamp(number)))
            tell(done, "read")
        if mode == "plain":
            view.flush()
    for number in rng.sample(range(ranges), 8):
        equal(host(f"dd if=large bs=1 skip={at[number]} count=8 status=none"), stamp(number).decode())
    os.unlink(path)


def small_files():
    host(f"mkdir -p small && cd small && for i in $(seq 0 {small - 1}); do printf %08d $i >$i; done")
    for number in range(small):
        path = f"{S}/small/{number}"
        equal((number, read_mapped(path)), (number, stamp(number)))
        tell(number, "small files read")
    host("rm -r small")


def held():
    """Opens and maps all files at once."""
    os.mkdir(f"{S}/held")
    views = []
    for number in range(HELD):
        write(f"{S}/held/{number}", bytes(4096))
        fd = os.open(f"{S}/held/{number}", os.O_RDWR)
        views.append((fd, mmap.mmap(fd, 4096)))
    for turn in range(3):
        for number, (_, view) in enumerate(views):
            equal((number, view[:8]), (number, stamp(turn - 1 + number) if turn else bytes(8)))
            view[:8] = stamp(turn + number)
    for fd, view in views:
        if mode == "plain":
            view.flush()
        view.close()
        os.close(fd)
    equal(host("cat held/7 | head -c 8"), stamp(9).decode())
    host("rm -r held")


def dropped():
    """Drops the caches over and over while two processes each read and write an eighth of the ranges."""
    half = ranges // 8
    host(f"truncate -s {half * RANGE} a && truncate -s {half * RANGE} b")
    counts = dict.fromkeys("ab", 0)

    def work(name):
        counts[name] += 1
        with mapped(f"{S}/{name}", half * RANGE, writable=True) as view:
            for number in rng.sample(range(half), min(half, 20)):
                at = number * RANGE + 4096
                # Only this process writes there, and the number only grows.
                before = int.from_bytes(view[at : at + 8], "little")
                assert before < counts[name], f"{before} at {at}, expected at most {counts[name] - 1}"
                view[at : at + 8] = counts[name].to_bytes(8, "little")
                assert int.from_bytes(view[at : at + 8], "little") == counts[name]

    with Busy(lambda: work("a"), "a") as a, Busy(lambda: work("b"), "b") as b:
        end = time.monotonic() + seconds
        drops = 0
        while time.monotonic() < end:
            drop_caches()
            drops += 1
    print(f"the caches were dropped {drops} times, under {a.rounds()} and {b.rounds()} rounds of work")
    os.unlink(f"{S}/a")
    os.unlink(f"{S}/b")


def mounted_again(times):
    """All mappings are gone after the share is unmounted."""
    host(f"truncate -s {16 * RANGE} file")
    for turn in range(times):
        with mapped(f"{S}/file", 16 * RANGE, writable=True) as view:
            for number in range(16):
                equal((turn, number, view[number * RANGE : number * RANGE + 8]), (turn, number, stamp(turn - 1) if turn else bytes(8)))
                view[number * RANGE : number * RANGE + 8] = stamp(turn)
            if mode == "plain":
                view.flush()
            elif turn == 0:
                # Without this the checks below would prove nothing.
                assert host_number("live_mappings") >= 16, "the host does not see the mappings"
        umount("s")
        # The daemon answers before it has finished. 2 s: it needs a millisecond for each mapping.
        deadline = time.monotonic() + 2
        while (live := host_number("live_mappings")) and time.monotonic() < deadline:
            time.sleep(0.02)
        equal((turn, live), (turn, 0))
        mount("s", None if mode == "plain" else mode)
    os.unlink(f"{S}/file")


mount("meet")
mount("s", None if mode == "plain" else mode)
# 20 mounts: enough for a leak of one mapping each to show.
parts = (working_set,), (small_files,), (held,), (dropped,), (mounted_again, 20)
steps(*[part for part in parts if not only or part[0].__name__ in only])
umount("s")
umount("meet")
