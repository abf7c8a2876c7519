#!/usr/bin/python3
"""Shares whose daemons have special options, prepared by the host: options.py DIRECTORY, which holds the shares."""

import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from errno import *

sys.path.insert(0, "/host")
from check import *

shares = sys.argv[1]


def share(tag):
    path = f"{shares}/{tag}"
    if not os.path.ismount(path):
        raise Skip(f"no share {tag}")
    return path


def is_read_only(s):
    """Nothing in this share can be changed, and the guest hears of it at each call."""
    equal(read(f"{s}/file"), b"from the host\n")
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
        refused(EROFS, os.open, f"{s}/file", flags)
    for path in ("file", "new"):
        refused(EROFS, os.open, f"{s}/{path}", os.O_WRONLY | os.O_CREAT)
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
def test_limited(_):
    """A guest at its limit waits, and df shows what the host wants."""
    s = share("limited")
    st = os.statvfs(s)
    equal(st.f_blocks * st.f_frsize, 4 << 20)
    write(f"{s}/file", b"x" * (1 << 20))
    os.sync()
    fd = os.open(f"{s}/file", os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 1 << 20)
    began = time.monotonic()
    for _ in range(4):
        equal(os.preadv(fd, [page], 0), 1 << 20)
    # The first takes what was saved up, and the second begins when nothing is owed.
    took = time.monotonic() - began
    assert took >= 1.9, took
    os.close(fd)


@test
def test_readonly(_):
    for tag in ("", "-always", "-no-open", "-writeback", "-metadata", "-mount"):
        s = share(f"readonly{tag}")
        is_read_only(s)
        # What else a read-only file system says needs the guest's own option.
        equal(os.access(f"{s}/file", os.W_OK), True)
        subprocess.run(["mount", "-o", "remount,ro", s], check=True)
        equal(os.access(f"{s}/file", os.W_OK), False)
        equal(os.statvfs(s).f_flag & os.ST_RDONLY, os.ST_RDONLY)
        is_read_only(s)


@test
def test_several(_):
    """Several directories of the host, one of them read-only, below one that nobody changes."""
    s = share("several")
    equal(sorted(os.listdir(s)), ["first", "second"])
    for path in ("new", "second/new", "second/mounted/new"):
        refused(EROFS, os.mkdir, f"{s}/{path}")
        refused(EROFS, write, f"{s}/{path}", b"x")
    refused(EROFS, os.open, f"{s}/second/file", os.O_RDWR)
    refused(EROFS, os.unlink, f"{s}/second/file")
    equal(read(f"{s}/second/file"), b"from the host\n")
    write(f"{s}/first/new", b"x")
    equal(read(f"{s}/first/new"), b"x")
    refused(EXDEV, os.rename, f"{s}/first/new", f"{s}/second/new")
    refused(EXDEV, os.link, f"{s}/first/new", f"{s}/new")
    # Each is a mount, with the sizes of its file system.
    parts = [f"{s}/first", f"{s}/second", f"{s}/second/mounted"]
    assert all(os.path.ismount(part) for part in parts), parts
    equal(os.statvfs(parts[2]).f_blocks * os.statvfs(parts[2]).f_frsize, 8 << 20)
    assert os.statvfs(parts[0]).f_blocks > 0 and os.statvfs(parts[0]).f_blocks != os.statvfs(s).f_blocks
    for part in reversed(parts):
        subprocess.run(["umount", part], check=True)
    equal(read(f"{s}/first/new"), b"x")


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
def test_overlay(_):
    """The upper and the work directory of an overlay are on a share, whose daemon has the usual capabilities."""
    s = share("overlay")
    lower, upper, merged = "/tmp/lower", f"{s}/upper", "/tmp/merged"
    for path in (lower, upper, merged, f"{s}/work"):
        os.mkdir(path)
    for name in ("removed", "replaced", "appended", "moved", "d/in", "e/in", "tree/deep/file"):
        os.makedirs(os.path.dirname(f"{lower}/{name}"), exist_ok=True)
        write(f"{lower}/{name}", b"lower", 0o640)
    os.symlink("appended", f"{lower}/link")
    os.mkfifo(f"{lower}/fifo")
    os.link(f"{lower}/moved", f"{lower}/hard")
    os.setxattr(f"{lower}/appended", "trusted.mine", b"kept")

    def mount():
        options = f"lowerdir={lower},upperdir={upper},workdir={s}/work,redirect_dir=on,metacopy=on,index=on"
        done = subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], capture_output=True, text=True)
        if "unknown filesystem type" in done.stderr:
            raise Skip("this kernel has no overlayfs")
        equal((done.returncode, done.stderr), (0, ""))

    def look():
        names = ["appended", "d", "e", "fifo", "hard", "link", "moved-too", "new", "replaced", "tree2"]
        equal(sorted(os.listdir(merged)), names)
        equal(read(f"{merged}/appended"), b"lower and upper")
        equal(os.getxattr(f"{merged}/appended", "trusted.mine"), b"kept")
        equal((read(f"{merged}/replaced"), os.listdir(f"{merged}/d")), (b"new", ["other"]))
        equal((read(f"{merged}/moved-too"), os.stat(f"{merged}/hard").st_mode & 0o777), (b"lower", 0o604))
        equal((read(f"{merged}/tree2/deep/file"), os.listdir(f"{merged}/e")), (b"lower", []))
        equal((os.lstat(f"{merged}/link").st_uid, os.stat(f"{merged}/fifo").st_uid), (1000, 1000))

    mount()
    os.unlink(f"{merged}/removed")
    os.unlink(f"{merged}/replaced")
    write(f"{merged}/replaced", b"new")
    write(f"{merged}/appended", b" and upper", flags=os.O_WRONLY | os.O_APPEND)
    os.rename(f"{merged}/moved", f"{merged}/moved-too")
    os.chmod(f"{merged}/hard", 0o604)
    os.unlink(f"{merged}/d/in")
    os.rmdir(f"{merged}/d")
    os.mkdir(f"{merged}/d")
    write(f"{merged}/d/other", b"")
    os.unlink(f"{merged}/e/in")
    os.rename(f"{merged}/tree", f"{merged}/tree2")
    os.lchown(f"{merged}/link", 1000, 1000)
    os.chown(f"{merged}/fifo", 1000, 1000)
    write(f"{merged}/new", b"")
    look()
    subprocess.run(["umount", merged], check=True)
    for whiteout in ("removed", "moved", "tree", "e/in"):
        left = os.lstat(f"{upper}/{whiteout}")
        equal((whiteout, stat.S_ISCHR(left.st_mode), left.st_rdev), (whiteout, True, 0))
    equal(os.getxattr(f"{upper}/d", "trusted.overlay.opaque"), b"y")
    equal(os.getxattr(f"{upper}/tree2", "trusted.overlay.redirect"), b"tree")
    refused(ENODATA, os.getxattr, f"{upper}/appended", "user.virtiofs.trusted.mine")
    mount()
    look()
    subprocess.run(["umount", merged], check=True)
    log = subprocess.run(["dmesg"], capture_output=True, text=True).stdout
    # It says what the upper directory's file system cannot do.
    equal([line for line in log.splitlines() if "overlayfs:" in line and "upper" in line], [])
    shutil.rmtree(f"{s}/work")


@test
def test_a_mount_that_maps_ids(_):
    """The host maps ids, and the daemon's own user has none there."""
    s = share("idmapped")
    equal((os.stat(s).st_uid, os.stat(f"{s}/hosts").st_uid), (0, 0))
    os.chmod(s, 0o1777)

    def change(name):
        os.mkdir(f"{s}/{name}")
        write(f"{s}/{name}/a", b"a")
        os.rename(f"{s}/{name}/a", f"{s}/{name}/b")
        os.link(f"{s}/{name}/b", f"{s}/{name}/c")
        os.symlink("c", f"{s}/{name}/d")
        os.rename(f"{s}/{name}/d", f"{s}/{name}-e")
        renameat2(f"{s}/{name}/b", f"{s}/{name}-e", 2)
        fd = os.open(s, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.write(fd, b"unnamed")
        call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(f"{s}/{name}-named"), 0x400)
        equal(read(f"{s}/{name}-named"), b"unnamed")
        equal((os.stat(f"{s}/{name}-named").st_uid, os.stat(f"{s}/{name}-e").st_nlink), (os.getuid(), 2))
        os.unlink(f"{s}/{name}/b")

    change("root")
    as_user(1000, 1000, [], change, "user")
    as_user(1001, 1001, [], lambda: refused(EPERM, os.rename, f"{s}/user-e", f"{s}/other"))
    as_user(1001, 1001, [], write, f"{s}/mine", b"")
    as_user(1001, 1001, [], lambda: refused(EACCES, os.rename, f"{s}/mine", f"{s}/root/mine"))


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
def test_capabilities_of_a_user(_):
    """The guest's kernel has checked them. The host does not know them."""
    for tag in ("translate", "readdir"):
        s = share(tag)
        os.mkdir(f"{s}/closed", 0o555)
        os.chown(f"{s}/closed", 1000, 1000)
        script = "mkdir d; echo x >f; ln -s x l; mknod n c 1 3"
        subprocess.run(["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--inh-caps=+dac_override,+mknod",
                        "--ambient-caps=+dac_override,+mknod", "sh", "-ec", script], cwd=f"{s}/closed", check=True)
        owners = {name: os.lstat(f"{s}/closed/{name}").st_uid for name in os.listdir(f"{s}/closed")}
        equal(owners, dict.fromkeys("dfln", 1000))
        as_user(1000, 1000, [], lambda: refused(EACCES, os.mkdir, f"{s}/closed/e"))


@test
def test_submounts(_):
    s = share("submounts")
    # Nobody has been in the submount yet. find(1) would take it for the share's root if both had one number.
    found = subprocess.run(["find", s], capture_output=True, text=True)
    equal((found.stderr, f"{s}/mounted/file" in found.stdout.splitlines()), ("", True))
    # Open it first: stat alone does not make the guest mount it.
    equal(read(f"{s}/mounted/file"), b"in the submount\n")
    ours, theirs = os.stat(s), os.stat(f"{s}/mounted")
    assert ours.st_dev != theirs.st_dev, "the submount is not announced"
    for tag in ("submounts", "onefs"):
        # Each directory has its own: that of its file system or, on the host, of its project.
        equal(os.statvfs(f"{share(tag)}/mounted").f_blocks * os.statvfs(f"{share(tag)}/mounted").f_frsize, 8 << 20)
        assert os.statvfs(share(tag)).f_blocks * os.statvfs(share(tag)).f_frsize > 8 << 20
    write(f"{s}/mounted/guests", b"x")
    refused(EXDEV, os.rename, f"{s}/mounted/guests", f"{s}/guests")
    equal(os.stat(f"{s}/mounted/..").st_ino, ours.st_ino)
    assert f"{s}/mounted" in open("/proc/self/mountinfo").read()


@test
def test_special_files_of_the_host(_):
    """They are the guest's own here: the host's server and the host's reader hear nothing."""
    s = share("submounts")
    assert stat.S_ISSOCK(os.stat(f"{s}/socket").st_mode) and stat.S_ISFIFO(os.stat(f"{s}/fifo").st_mode)
    kinds = {entry.name: stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) for entry in os.scandir(s)}
    equal((kinds["socket"], kinds["fifo"]), (stat.S_IFSOCK, stat.S_IFIFO))
    refused(ECONNREFUSED, socket.socket(socket.AF_UNIX).connect, f"{s}/socket")
    refused(ENXIO, os.open, f"{s}/socket", os.O_RDONLY)
    refused(ENXIO, os.open, f"{s}/fifo", os.O_WRONLY | os.O_NONBLOCK)
    fd = os.open(f"{s}/fifo", os.O_RDWR)
    os.write(fd, b"to myself")
    equal(os.read(fd, 20), b"to myself")
    os.rename(f"{s}/socket", f"{s}/moved")
    os.unlink(f"{s}/moved")


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
        # The daemon has capabilities in a user namespace of its own only.
        os.mkdir(f"{s}/closed", 0o555)
        if tag == "user":
            os.mkdir(f"{s}/closed/d")
            os.rmdir(f"{s}/closed/d")
        else:
            refused(EACCES, os.mkdir, f"{s}/closed/d")
        os.rmdir(f"{s}/closed")
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
