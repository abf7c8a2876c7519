#!/usr/bin/python3
"""Eight processes make, move and remove files, each in a directory of its own: own-directories.py ROUNDS DIRECTORY..."""

import os
import sys

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


for directory in directories:
    workers = [start(f"{directory}/{worker}") for worker in range(WORKERS)]
    failed = [pid for pid in workers if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"{directory}: {len(failed)} of {WORKERS} processes failed")
    print(f"{directory}: {WORKERS * rounds} rounds")
