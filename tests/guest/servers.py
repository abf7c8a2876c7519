#!/usr/bin/python3
"""Uses files of the share /mnt/s, each with a process of its own, until the file "end" is there: servers.py [--lock] FILE...

With --lock each process holds a flock(2) lock of its file meanwhile. Each time that a file was opened, read, written, synced and
closed it prints "FILE ok", otherwise "FILE" and the errno's name.
"""

import errno
import fcntl
import os
import sys
import time

S = "/mnt/s"


def use(path, number):
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, b"%08d" % number, 0)
        os.fsync(fd)
        got = os.pread(fd, 100, 0)[:8]
        if got != b"%08d" % number:
            sys.exit(f"{path}: read {got} after writing {number}")
        os.fstat(fd)
    finally:
        os.close(fd)


def run(name):
    number = 0
    if locks:
        fcntl.flock(held := os.open(f"{S}/{name}", os.O_RDWR), fcntl.LOCK_EX)
    while not os.path.exists(f"{S}/end"):
        number += 1
        try:
            use(f"{S}/{name}", number)
            said = "ok"
        except OSError as error:
            said = errno.errorcode[error.errno]
        os.write(1, f"{name} {said}\n".encode())
        time.sleep(0.02)


children = []
names = sys.argv[1:]
locks = names[0] == "--lock"
for name in names[locks:]:
    child = os.fork()
    if not child:
        run(name)
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
