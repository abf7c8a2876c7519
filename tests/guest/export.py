#!/usr/bin/env python3
"""File handles of files that this guest's kernel has forgotten: export.py handles EXPORTED PLAIN, two mounts of one share, of which the
second one's daemon has no --nfs-export; or after that export.py client MOUNT..., of an NFS server in this guest that exports the first."""

import ctypes
import errno
import os
import sys
import time

from check import AT_FDCWD, call, equal, refused, write

DIRECTORY = "deep/er/and/deeper"
FILES = 200
# 60 s: a limit on hangs.
PATIENCE = 60


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]


def handle(path):
    found, mount = Handle(bytes=128), ctypes.c_int()
    call("name_to_handle_at", AT_FDCWD, os.fsencode(path), ctypes.byref(found), ctypes.byref(mount), 0)
    return found


def open_handle(mount, found, flags=os.O_RDONLY):
    top = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return call("open_by_handle_at", top, ctypes.byref(found), flags)
    finally:
        os.close(top)


def read(fd):
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def drop_caches():
    os.sync()
    write("/proc/sys/vm/drop_caches", b"3")


def content(number):
    return f"file {number}\n".encode() * 100


def forget(plain):
    """Waits until the kernel has forgotten a file: then its handle is stale where the daemon does not know it."""
    path = f"{plain}/{DIRECTORY}/0"
    known = handle(path)
    end = time.monotonic() + PATIENCE
    while True:
        drop_caches()
        try:
            os.close(open_handle(plain, known))
        except OSError as error:
            equal(error.errno, errno.ESTALE)
            return
        assert time.monotonic() < end, "the kernel does not forget a file"


def handles(exported, plain):
    os.makedirs(f"{exported}/{DIRECTORY}")
    for number in range(FILES):
        write(f"{exported}/{DIRECTORY}/{number}", content(number))
    names = ["", DIRECTORY.split("/")[0], DIRECTORY, *(f"{DIRECTORY}/{number}" for number in range(FILES))]
    found = {name: handle(f"{exported}/{name}") for name in names}
    for _ in range(2):
        forget(plain)
        for name, known in found.items():
            fd = open_handle(exported, known)
            if name.startswith(f"{DIRECTORY}/"):
                equal(read(fd), content(int(name.rpartition("/")[2])))
            else:
                equal(sorted(os.listdir(fd)), sorted(os.listdir(f"{exported}/{name}")))
                os.close(fd)
    # By a handle alone a directory gets its place among its parents, with nothing of them in memory.
    forget(plain)
    fd = open_handle(exported, found[DIRECTORY])
    equal(os.readlink(f"/proc/self/fd/{fd}"), f"{exported}/{DIRECTORY}")
    os.close(fd)
    # Renamed, and removed.
    os.rename(f"{exported}/{DIRECTORY}/0", f"{exported}/moved")
    os.unlink(f"{exported}/{DIRECTORY}/1")
    os.rename(f"{exported}/{DIRECTORY}/2", f"{exported}/{DIRECTORY}/3")
    os.mkdir(f"{exported}/removed")
    removed = handle(f"{exported}/removed")
    os.rmdir(f"{exported}/removed")
    write(f"{exported}/{DIRECTORY}/1", b"another file")
    write(f"{exported}/{DIRECTORY}/0", content(0))
    for _ in range(2):
        equal(read(open_handle(exported, found[f"{DIRECTORY}/0"])), content(0))
        equal(read(open_handle(exported, found[f"{DIRECTORY}/2"])), content(2))
        for stale in (found[f"{DIRECTORY}/1"], found[f"{DIRECTORY}/3"], removed):
            refused(errno.ESTALE, open_handle, exported, stale)
        forget(plain)
    write(f"{exported}/{DIRECTORY}/1", content(1))
    write(f"{exported}/{DIRECTORY}/2", content(2))
    write(f"{exported}/{DIRECTORY}/3", content(3))
    print("ok handles")


def client(*mounts):
    for mount in mounts:
        for _ in range(2):
            directory = os.open(f"{mount}/{DIRECTORY}", os.O_RDONLY | os.O_DIRECTORY)
            files = [os.open(str(number), os.O_RDONLY, dir_fd=directory) for number in range(FILES)]
            # Of the server too, which is this kernel.
            drop_caches()
            drop_caches()
            equal(sorted(os.listdir(directory)), sorted(map(str, range(FILES))))
            for number, fd in enumerate(files):
                equal(os.stat(str(number), dir_fd=directory).st_ino, os.fstat(fd).st_ino)
                equal(read(fd), content(number))
            drop_caches()
            fd = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=directory)
            os.write(fd, b"by NFS")
            drop_caches()
            os.write(fd, b" again")
            os.close(fd)
            drop_caches()
            equal(read(os.open("new", os.O_RDONLY, dir_fd=directory)), b"by NFS again")
            os.unlink("new", dir_fd=directory)
            os.close(directory)
    print("ok client")


{"handles": handles, "client": client}[sys.argv[1]](*sys.argv[2:])
