#!/usr/bin/python3
"""Shares whose daemons have special options, prepared by the host: options.py DIRECTORY, which holds the shares."""

import os
import stat
import subprocess
import sys
from errno import *

sys.path.insert(0, "/host")
from check import *

shares = sys.argv[1]


def share(tag):
    path = f"{shares}/{tag}"
    if not os.path.ismount(path):
        raise Skip(f"no share {tag}")
    return path


@test
def test_readonly(_):
    s = share("readonly")
    equal(read(f"{s}/file"), b"from the host\n")
    for path in ("file", "new"):
        refused(EROFS, os.open, f"{s}/{path}", os.O_WRONLY | os.O_CREAT)
    refused(EROFS, os.open, f"{s}/file", os.O_RDONLY | os.O_TRUNC)
    refused(EROFS, os.truncate, f"{s}/file", 0)
    refused(EROFS, os.chmod, f"{s}/file", 0)
    refused(EROFS, os.chown, f"{s}/file", 1, 1)
    refused(EROFS, os.utime, f"{s}/file")
    refused(EROFS, os.mkdir, f"{s}/new")
    refused(EROFS, os.mkfifo, f"{s}/new")
    refused(EROFS, os.symlink, "x", f"{s}/new")
    refused(EROFS, os.link, f"{s}/file", f"{s}/new")
    refused(EROFS, os.rename, f"{s}/file", f"{s}/new")
    refused(EROFS, os.unlink, f"{s}/file")
    refused(EROFS, os.rmdir, f"{s}/dir")
    refused(EROFS, os.setxattr, f"{s}/file", "user.x", b"")
    refused(EROFS, os.removexattr, f"{s}/file", "user.host")
    refused(EROFS, os.open, s, os.O_TMPFILE | os.O_RDWR)
    equal(os.getxattr(f"{s}/file", "user.host"), b"host")
    equal(sorted(os.listdir(s)), ["dir", "file"])


@test
def test_xattrmap(_):
    s = share("xattrmap")
    write(f"{s}/mapped", b"")
    os.setxattr(f"{s}/mapped", "user.a", b"1")
    os.setxattr(f"{s}/mapped", "trusted.b", b"2")
    equal(sorted(os.listxattr(f"{s}/mapped")), ["trusted.b", "user.a"])
    equal((os.getxattr(f"{s}/mapped", "user.a"), os.getxattr(f"{s}/mapped", "trusted.b")), (b"1", b"2"))
    os.setxattr(f"{s}/mapped", "user.gone", b"")
    os.removexattr(f"{s}/mapped", "user.gone")
    # The guest does not see attributes that the host sets outside of the prefix.
    equal(os.listxattr(f"{s}/hosts"), [])


@test
def test_no_xattrs(_):
    s = share("readdir")
    refused(EOPNOTSUPP, os.setxattr, f"{s}/file", "user.x", b"")
    refused(EOPNOTSUPP, os.getxattr, f"{s}/file", "user.host")


@test
def test_translated_ids(_):
    s = share("translate")
    equal((os.stat(f"{s}/hosts").st_uid, os.stat(f"{s}/hosts").st_gid), (42, 43))
    write(f"{s}/guests", b"")
    os.chown(f"{s}/guests", 1000, 1001)
    equal((os.stat(f"{s}/guests").st_uid, os.stat(f"{s}/guests").st_gid), (1000, 1001))
    os.chmod(s, 0o777)
    as_user(1002, 1002, [], lambda: write(f"{s}/created", b""))
    equal(os.stat(f"{s}/created").st_uid, 1002)
    refused(EPERM, os.chown, f"{s}/guests", 70000, 0)


@test
def test_submounts(_):
    s = share("submounts")
    # Open it first: stat alone does not make the guest mount it.
    equal(read(f"{s}/mounted/file"), b"in the submount\n")
    ours, theirs = os.stat(s), os.stat(f"{s}/mounted")
    assert ours.st_dev != theirs.st_dev, "the submount is not announced"
    write(f"{s}/mounted/guests", b"x")
    refused(EXDEV, os.rename, f"{s}/mounted/guests", f"{s}/guests")
    equal(os.stat(f"{s}/mounted/..").st_ino, ours.st_ino)
    assert f"{s}/mounted" in open("/proc/self/mountinfo").read()


@test
def test_submounts_not_announced(_):
    s = share("onefs")
    equal(os.stat(s).st_dev, os.stat(f"{s}/mounted").st_dev)
    equal(read(f"{s}/mounted/file"), b"in the submount\n")


@test
def test_escapes(_):
    """The guest itself follows links that lead out of the share. The host never does."""
    s = share("submounts")
    for name in ("absolute", "relative", "through-dots"):
        refused(ENOENT, os.stat, f"{s}/{name}")
        refused(ENOENT, os.open, f"{s}/{name}", os.O_RDONLY)
    equal(os.stat(f"{s}/..").st_ino, os.stat(shares).st_ino)
    refused(ENOENT, os.stat, f"{s}/../secret")
    # The same for a link within a path, and for a link that replaces a directory that the guest has opened.
    refused(ENOENT, os.stat, f"{s}/outside/secret")


@test
def test_ordinary_user(_):
    for tag in ("user", "user-none"):
        s = share(tag)
        equal(read(f"{s}/hosts"), b"from the host\n")
        write(f"{s}/guests", b"from the guest\n")
        equal(read(f"{s}/guests"), b"from the guest\n")
        os.makedirs(f"{s}/a/b")
        os.rename(f"{s}/guests", f"{s}/a/b/moved")
        os.symlink("a/b/moved", f"{s}/link")
        equal(read(f"{s}/link"), b"from the guest\n")
        os.unlink(f"{s}/link")
        equal(sorted(os.listdir(s)), ["a", "hosts"])


@test
def test_mapped_user(_):
    """Root in the guest is the daemon's user on the host. No other user exists."""
    s = share("user-mapped")
    write(f"{s}/root", b"x")
    equal((os.stat(f"{s}/root").st_uid, os.stat(f"{s}/root").st_gid), (0, 0))
    os.chown(f"{s}/root", 0, 0)
    try:
        os.chown(f"{s}/root", 1000, 1000)
        raise AssertionError("an owner that the daemon has no name for")
    except OSError:
        pass


@test
def test_legacy_options(_):
    s = share("legacy")
    write(f"{s}/f", b"x")
    os.setxattr(f"{s}/f", "user.x", b"y")
    equal(os.getxattr(f"{s}/f", "user.x"), b"y")


@test
def test_large_directory_without_plus(_):
    s = share("readdir")
    equal(len(os.listdir(f"{s}/many")), 3000)
    equal(sum(entry.stat().st_size for entry in os.scandir(f"{s}/many")), 0)


main("options", "/tmp", sys.argv[2:])
