#!/usr/bin/python3
"""callers.py TAG[:FEATURE]...: uses the share of each tag, and looks whether it has the features that its caller asked for.

Features: xattr, acl, direct (O_DIRECT), submount, whole (no submounts), root (the share's files belong to root), ids (some user IDs are
forbidden)."""

import errno
import hashlib
import mmap
import os
import select
import socket
import stat
import sys


sys.path.insert(0, "/host")
import oracle
import window

# A limit on hangs, in seconds.
LIMIT = 100


def main():
    agent = window.start_agent([argument.split(":")[0] for argument in sys.argv[1:]])
    for argument in sys.argv[1:]:
        tag, *features = argument.split(":")
        os.chdir(f"/mnt/{tag}")
        use(tag)
        if agent:
            hears()
        for feature in ("xattr", "acl", "direct", "submount", "whole", "root", "ids"):
            check = globals()[f"has_{feature}"]
            if feature in features:
                check()
            elif feature in ("xattr", "acl"):
                assert_fails(errno.EOPNOTSUPP, check)
        print(f"{tag}: ok", flush=True)


def hears():
    """The host makes a directory again and again."""
    watcher = oracle.Watcher(["."], oracle.CREATE)
    ready, _, _ = select.select([watcher.fd], [], [], LIMIT)
    assert ready, "no event came"
    assert "host-made" in [name for _, _, _, name in watcher.now()]
    os.close(watcher.fd)


def use(tag):
    """What every guest does with a share. The host looks at the checksum."""
    with open("host") as file:
        assert file.read() == f"from the host for {tag}\n"
    data = os.urandom(1 << 20)
    with open("guest", "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open("guest", "rb") as file:
        assert file.read() == data
    with open("sum", "w") as file:
        file.write(f"{hashlib.sha256(data).hexdigest()}  guest\n")
    os.mkdir("dir")
    os.rename("dir", "renamed")
    os.symlink("../host", "renamed/link")
    os.link("guest", "renamed/guest")
    with open("renamed/link") as file:
        assert tag in file.read()
    assert sorted(os.listdir("renamed")) == ["guest", "link"]
    assert os.stat("guest").st_nlink == 2
    os.unlink("renamed/guest")
    os.mkfifo("fifo")
    fifo = os.open("fifo", os.O_RDWR)
    assert os.write(fifo, b"x") == 1 and os.read(fifo, 1) == b"x"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen()
    socket.socket(socket.AF_UNIX).connect("socket")
    assert stat.S_ISSOCK(os.stat("socket").st_mode)
    assert os.statvfs(".").f_blocks > 0


def has_xattr():
    os.setxattr("guest", "user.name", b"value")
    assert os.getxattr("guest", "user.name") == b"value"


def has_acl():
    # struct posix_acl_xattr_header and its entries: the owner, user 1, the group, the mask, others.
    entries = [(1, 7, 0xFFFFFFFF), (2, 4, 1), (4, 0, 0xFFFFFFFF), (16, 4, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]
    number = lambda value, size: value.to_bytes(size, "little")
    acl = number(2, 4) + b"".join(number(tag, 2) + number(perm, 2) + number(who, 4) for tag, perm, who in entries)
    os.setxattr("renamed", "system.posix_acl_default", acl)
    assert os.getxattr("renamed", "system.posix_acl_default") == acl


def has_direct():
    page = mmap.mmap(-1, 4096)
    page.write(b"d" * 4096)
    file = os.open("direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert os.writev(file, [page]) == 4096
    page.seek(0)
    page.write(bytes(4096))
    assert os.preadv(file, [page], 0) == 4096 and page[:] == b"d" * 4096


def has_submount():
    # The first use mounts it.
    assert os.listdir("mounted") == ["inside"] and os.path.ismount("mounted")


def has_whole():
    assert os.listdir("mounted") == ["inside"] and not os.path.ismount("mounted")


def has_root():
    assert os.stat("host").st_uid == os.stat("guest").st_uid == 0


def has_ids():
    os.chown("guest", 999, 999)
    assert os.stat("guest").st_uid == 999
    for forbidden in (65536, 4294967293):
        assert_fails(errno.EPERM, lambda: os.chown("guest", forbidden, -1))


def assert_fails(wanted, call):
    try:
        call()
    except OSError as error:
        assert error.errno == wanted, error
    else:
        raise AssertionError(f"{call} worked")


main()
