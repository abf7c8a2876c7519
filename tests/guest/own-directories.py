#!/usr/bin/python3
"""Eight processes make, move and remove files, each in a directory of its own: own-directories.py ROUNDS DIRECTORY... A file that a
process has open outlives its name."""

import os
import sys
import time

rounds, directories = int(sys.argv[1]), sys.argv[2:]
WORKERS = 8


def work(base):
    for number in range(rounds):
        path, data = f"{base}/{number}", b"%d" % number
        os.mkdir(path)
        with open(f"{path}/new", "xb") as file:
            file.write(data)
        os.rename(f"{path}/new", f"{path}/file")
        if os.stat(f"{path}/file").st_size != len(data):
            sys.exit(f"{path}: wrong size")
        with open(f"{path}/file", "rb") as file:
            if file.read() != data:
                sys.exit(f"{path}: wrong contents")
        os.remove(f"{path}/file")
        os.rmdir(path)


def start(base):
    os.mkdir(base)
    pid = os.fork()
    if not pid:
        work(base)
        os._exit(0)
    return pid


def remove_open(path):
    with open(path, "xb") as file:
        file.write(b"data")
    # The daemon may keep a file open for some seconds after the last request.
    time.sleep(3)
    fd = os.open(path, os.O_RDWR)
    os.remove(path)
    if os.pread(fd, 9, 0) != b"data" or os.pwrite(fd, b"more", 4) != 4 or os.pread(fd, 9, 0) != b"datamore":
        sys.exit(f"{path}: wrong contents")
    os.fsync(fd)
    if os.fstat(fd).st_size != 8:
        sys.exit(f"{path}: wrong size")
    os.close(fd)


for directory in directories:
    remove_open(f"{directory}/{os.path.basename(directory)}")
    workers = [start(f"{directory}/{os.path.basename(directory)}-{worker}") for worker in range(WORKERS)]
    failed = [pid for pid in workers if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"{directory}: {len(failed)} of {WORKERS} processes failed")
    print(f"{directory}: {WORKERS * rounds} rounds")
