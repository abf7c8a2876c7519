"""Prints the operations per second on directory entries of DIR, by WORKERS processes: meta.py DIR MILLISECONDS WHAT WORKERS."""

import os
import shutil
import sys
import time

directory, seconds, what, workers = sys.argv[1], int(sys.argv[2]) / 1000, sys.argv[3], int(sys.argv[4])

# Files of one pass, which takes a second under emulation. The quick form, whose times mean nothing, takes a tenth.
COUNT = 500 if seconds >= 1 else 50


def create(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def fill(place):
    paths = [f"{place}/{n}" for n in range(COUNT)]
    for path in paths:
        create(path)
    return paths


def each(action, paths):
    before = time.perf_counter()
    for path in paths:
        action(path)
    return len(paths), time.perf_counter() - before


def forget():
    """Drops the guest's cache of names and attributes."""
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("2")


def creating(place):
    new = [f"{place}/new{n}" for n in range(COUNT)]
    result = each(create, new)
    each(os.unlink, new)
    return result


def unlinking(place):
    return each(os.unlink, fill(place))


def opening(place, paths):
    return each(lambda path: os.close(os.open(path, os.O_RDONLY)), paths)


def looking(place, paths):
    forget()
    return each(os.stat, paths)


def listing(place, paths):
    forget()
    before = time.perf_counter()
    with os.scandir(place) as entries:
        for entry in entries:
            entry.stat()
    return len(paths), time.perf_counter() - before


PASSES = {"create": creating, "unlink": unlinking, "open": opening, "stat": looking, "list": listing}


def work(place, start):
    """Operations per second, in passes until the time is over. The preparation of a pass is not measured."""
    os.mkdir(place)
    prepared = [] if what in ("create", "unlink") else [fill(place)]
    os.read(start, 1)
    deadline = time.monotonic() + seconds
    operations = spent = 0
    while not operations or time.monotonic() < deadline:
        done, took = PASSES[what](place, *prepared)
        operations, spent = operations + done, spent + took
    return operations / spent


root = os.path.join(directory, "meta")
os.mkdir(root)
start, go = os.pipe()
results = []
for worker in range(workers):
    result, tell = os.pipe()
    if os.fork() == 0:
        os.write(tell, b"%f" % work(f"{root}/{worker}", start))
        os._exit(0)
    os.close(tell)
    results.append(result)
# Time for all workers to get ready. A worker that is late starts late: it measures its own passes.
time.sleep(seconds / 4)
os.write(go, b"x" * workers)
print(sum(float(os.read(result, 64)) for result in results))
shutil.rmtree(root)
