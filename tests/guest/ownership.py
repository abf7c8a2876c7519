#!/usr/bin/python3
"""Shares of daemons of an ordinary user that keep owners in an extended attribute: ownership.py DIRECTORY, which holds
the shares."""

import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from errno import *

sys.path.insert(0, "/host")
from check import *

shares = [f"{sys.argv[1]}/{tag}" for tag in ("kept", "kept-none")]
OVERRIDE = "user.containers.override_stat"


def seen(path):
    st = os.lstat(path)
    return st.st_uid, st.st_gid, st.st_mode, st.st_rdev


def run(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


@test
def test_root_of_a_guest_unpacks_a_root_file_system(work):
    members = [
        # name, type, mode, owner, group, what else
        ("etc", tarfile.DIRTYPE, 0o755, 0, 0, ""),
        ("etc/shadow", tarfile.REGTYPE, 0o640, 0, 42, ""),
        ("bin", tarfile.DIRTYPE, 0o755, 0, 0, ""),
        ("bin/su", tarfile.REGTYPE, 0o4755, 0, 0, ""),
        ("bin/wall", tarfile.REGTYPE, 0o2755, 0, 5, ""),
        ("bin/sh", tarfile.SYMTYPE, 0o777, 0, 0, "dash"),
        ("bin/hard", tarfile.LNKTYPE, 0o4755, 0, 0, "bin/su"),
        ("home", tarfile.DIRTYPE, 0o700, 1000, 1000, ""),
        ("locked", tarfile.DIRTYPE, 0o555, 1000, 1000, ""),
        ("locked/file", tarfile.REGTYPE, 0o000, 1000, 1001, ""),
        ("mail", tarfile.DIRTYPE, 0o2775, 0, 8, ""),
        ("tmp", tarfile.DIRTYPE, 0o1777, 0, 0, ""),
        ("null", tarfile.CHRTYPE, 0o666, 0, 0, (1, 3)),
        ("sda", tarfile.BLKTYPE, 0o660, 0, 6, (8, 0)),
        ("fifo", tarfile.FIFOTYPE, 0o600, 100, 101, ""),
    ]
    archive = f"{work}/root.tar"
    with tarfile.open(archive, "w") as tar:
        for name, kind, mode, uid, gid, more in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = kind, mode, uid, gid
            if isinstance(more, tuple):
                info.devmajor, info.devminor = more
            info.linkname = more if isinstance(more, str) else ""
            info.size = 5 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"data\n"))
    local = f"{work}/local"
    for root in [local] + [f"{s}/root" for s in shares]:
        os.mkdir(root)
        run("tar", "-xpf", archive, "-C", root, "--numeric-owner")
    for s in shares:
        for name, *_ in members:
            equal((name, seen(f"{s}/root/{name}")), (name, seen(f"{local}/{name}")))
        equal(run("tar", "-df", archive, "-C", f"{s}/root", "--numeric-owner"), "")
        equal(os.stat(f"{s}/root/bin/hard").st_ino, os.stat(f"{s}/root/bin/su").st_ino)
        equal(run("find", f"{s}/root", "-type", "c"), f"{s}/root/null\n")
        found = run("find", f"{s}/root", "-perm", "-4000").split()
        equal(sorted(found), [f"{s}/root/bin/hard", f"{s}/root/bin/su"])


@test
def test_root_of_a_guest_installs_a_package(work):
    if not shutil.which("dpkg"):
        raise Skip("no dpkg")
    package = f"{work}/package"
    for directory in ("DEBIAN", "usr/bin", "var/lib/thing"):
        os.makedirs(f"{package}/{directory}")
    write(f"{package}/usr/bin/thing", b"#!/bin/sh\n")
    os.chmod(f"{package}/usr/bin/thing", 0o4755)
    os.chown(f"{package}/var/lib/thing", 1000, 1001)
    os.chmod(f"{package}/var/lib/thing", 0o2750)
    write(f"{package}/DEBIAN/control", b"Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n")
    write(f"{package}/DEBIAN/postinst", b"#!/bin/sh -e\nmknod $DPKG_ROOT/var/lib/thing/null c 1 3\n")
    os.chmod(f"{package}/DEBIAN/postinst", 0o755)
    run("dpkg-deb", "--build", package, f"{work}/thing.deb")
    for s in shares:
        root = f"{s}/installed"
        for directory in ("updates", "info", "triggers"):
            os.makedirs(f"{root}/var/lib/dpkg/{directory}")
        write(f"{root}/var/lib/dpkg/status", b"")
        run("dpkg", f"--root={root}", "--force-script-chrootless", "--log=/dev/null", "-i", f"{work}/thing.deb")
        equal(seen(f"{root}/usr/bin/thing")[:3], (0, 0, stat.S_IFREG | 0o4755))
        equal(seen(f"{root}/var/lib/thing")[:3], (1000, 1001, stat.S_IFDIR | 0o2750))
        equal(seen(f"{root}/var/lib/thing/null"), (0, 1001, stat.S_IFCHR | 0o644, os.makedev(1, 3)))
        run("dpkg", f"--root={root}", "--force-script-chrootless", "--log=/dev/null", "-P", "thing")
        equal(os.path.exists(f"{root}/usr/bin/thing"), False)


@test
def test_files_of_users(_):
    for s in shares:
        os.mkdir(f"{s}/public", 0o1777)
        os.chmod(f"{s}/public", 0o1777)
        as_user(1000, 1001, [], write, f"{s}/public/mine", b"mine", 0o600)
        equal(seen(f"{s}/public/mine")[:3], (1000, 1001, stat.S_IFREG | 0o600))
        as_user(1000, 1001, [], lambda: equal(read(f"{s}/public/mine"), b"mine"))
        as_user(1002, 1001, [], lambda: refused(EACCES, read, f"{s}/public/mine"))
        as_user(1002, 1001, [], lambda: refused(EPERM, os.unlink, f"{s}/public/mine"))
        as_user(1002, 1001, [], lambda: refused(EPERM, os.chown, f"{s}/public/mine", 1002, -1))
        as_user(1002, 1001, [], lambda: refused(EPERM, os.chmod, f"{s}/public/mine", 0o777))
        # By a group that is not the user's first.
        os.chmod(f"{s}/public/mine", 0o640)
        os.chown(f"{s}/public/mine", 0, 77)
        as_user(1002, 1002, [77], lambda: equal(read(f"{s}/public/mine"), b"mine"))
        os.mkdir(f"{s}/private", 0o700)
        as_user(1000, 1000, [], lambda: refused(EACCES, os.listdir, f"{s}/private"))
        # A directory that nobody may write to, and root may.
        os.mkdir(f"{s}/closed", 0o555)
        os.mkdir(f"{s}/closed/d")


@test
def test_special_files_are_the_guests(_):
    for s in shares:
        os.mknod(f"{s}/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        with open(f"{s}/zero", "rb") as zero:
            equal(zero.read(4), bytes(4))
        os.mkfifo(f"{s}/fifo")
        fd = os.open(f"{s}/fifo", os.O_RDWR)
        os.write(fd, b"to myself")
        equal(os.read(fd, 20), b"to myself")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(f"{s}/socket")
            server.listen()
            client.connect(f"{s}/socket")
        equal([stat.S_IFMT(seen(f"{s}/{name}")[2]) for name in ("fifo", "socket")], [stat.S_IFIFO, stat.S_IFSOCK])


@test
def test_set_id_bits(_):
    for s in shares:
        shutil.copyfile("/usr/bin/id", f"{s}/id")
        os.chown(f"{s}/id", 1005, 1006)
        os.chmod(f"{s}/id", 0o6777)
        caller = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")
        equal(run(*caller, f"{s}/id", "-u"), "1005\n")
        # Whoever writes to it takes them away.
        as_user(1000, 1000, [], lambda: write(f"{s}/id", b"", flags=os.O_WRONLY | os.O_TRUNC))
        equal(seen(f"{s}/id")[:3], (1005, 1006, stat.S_IFREG | 0o777))
        os.chmod(f"{s}/id", 0o6777)
        as_user(1000, 1000, [], lambda: write(f"{s}/id", b"x", flags=os.O_WRONLY))
        equal(seen(f"{s}/id")[2], stat.S_IFREG | 0o777)
        os.chmod(f"{s}/id", 0o6777)
        os.chown(f"{s}/id", 1000, -1)
        equal(seen(f"{s}/id")[2], stat.S_IFREG | 0o777)


@test
def test_the_attribute_is_hidden(_):
    for s in shares:
        write(f"{s}/hidden", b"")
        os.chown(f"{s}/hidden", 1, 2)
        os.setxattr(f"{s}/hidden", "user.x", b"y")
        equal(os.listxattr(f"{s}/hidden"), ["user.x"])
        refused(ENODATA, os.getxattr, f"{s}/hidden", OVERRIDE)
        refused(EPERM, os.setxattr, f"{s}/hidden", OVERRIDE, b"0:0:6777:file")
        refused(EPERM, os.removexattr, f"{s}/hidden", OVERRIDE)


main("ownership", "/tmp", sys.argv[2:])
