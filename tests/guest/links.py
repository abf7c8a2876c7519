#!/usr/bin/python3
"""Gives a file names and takes them away from several processes, while others look at it: links.py DIRECTORY [ROUNDS]

The file keeps its first name, so every link(2) must succeed, and in the end its link count is 1."""

import os
import sys

directory, rounds = sys.argv[1], int(sys.argv[2])
# Names come and go in directories of their own, since a directory's lock would keep these processes apart.
WORKERS = 3
LOOKERS = 1

file = f"{directory}/file"
stop = f"{directory}/stop"


def work(which):
    name = f"{directory}/{which}/name"
    for number in range(rounds):
        try:
            os.link(file, name)
        except FileNotFoundError:
            sys.exit(f"round {number}: link(2) says that the file is gone, and stat(2) that it has {os.stat(file).st_nlink} names")
        os.unlink(name)


def look():
    while not os.path.exists(stop):
        for _ in range(100):
            os.stat(file)


def start(function, *arguments):
    pid = os.fork()
    if pid:
        return pid
    function(*arguments)
    os._exit(0)


open(file, "w").close()
for which in range(WORKERS):
    os.mkdir(f"{directory}/{which}")
lookers = [start(look) for _ in range(LOOKERS)]
workers = [start(work, which) for which in range(WORKERS)]
failed = [pid for pid in workers if os.waitpid(pid, 0)[1]]
open(stop, "w").close()
failed += [pid for pid in lookers if os.waitpid(pid, 0)[1]]
if failed:
    sys.exit(1)
links = os.stat(file).st_nlink
if links != 1:
    sys.exit(f"{links} names, expected 1")
print(f"links: {WORKERS * rounds} names came and went")
