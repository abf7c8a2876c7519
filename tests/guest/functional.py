#!/usr/bin/python3
"""Single system calls and their results: functional.py DIRECTORY [TEST]..."""

import fcntl
import mmap
import os
import random
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from errno import *

sys.path.insert(0, "/host")
from check import *

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 1, 2, 16
USER, GROUP, OTHER_GROUP = 1000, 1000, 1234
# ioctl(2)'s requests for a file's flags and project id, and some of the flags: include/uapi/linux/fs.h.
GETFLAGS, SETFLAGS, FSGETXATTR, FSSETXATTR = 0x80086601, 0x40086602, 0x801C581F, 0x401C5820
SYNC_FL, IMMUTABLE_FL, APPEND_FL, NODUMP_FL, NOATIME_FL, DIRSYNC_FL = 0x8, 0x10, 0x20, 0x40, 0x80, 0x10000
PROJINHERIT_FL, NOCOW_FL, DAX_FL = 0x20000000, 0x800000, 0x2000000


@test
def test_create_open_flags(d):
    f = f"{d}/f"
    write(f, b"one", flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    refused(EEXIST, os.open, f, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    refused(ENOTDIR, os.open, f, os.O_DIRECTORY)
    refused(EISDIR, os.open, d, os.O_WRONLY)
    os.symlink("f", f"{d}/l")
    refused(ELOOP, os.open, f"{d}/l", os.O_NOFOLLOW)
    refused(ENOENT, os.open, f"{d}/none", os.O_RDONLY)
    refused(ENOTDIR, os.open, f"{f}/below", os.O_RDONLY)
    write(f, b"x", flags=os.O_WRONLY)
    equal(read(f), b"xne")
    write(f, b"y", flags=os.O_WRONLY | os.O_TRUNC)
    equal(read(f), b"y")
    fd = os.open(f, os.O_PATH)
    equal(os.fstat(fd).st_size, 1)
    os.close(fd)
    equal(stat.S_IMODE(os.stat(f).st_mode), 0o644)


@test
def test_umask(d):
    os.umask(0o027)
    os.close(os.open(f"{d}/f", os.O_CREAT | os.O_WRONLY, 0o666))
    os.mkdir(f"{d}/d", 0o777)
    os.mkfifo(f"{d}/p", 0o666)
    modes = [stat.S_IMODE(os.stat(f"{d}/{name}").st_mode) for name in "fdp"]
    equal(modes, [0o640, 0o750, 0o640])


@test
def test_large_requests(d):
    data = pattern(8 << 20)
    write(f"{d}/f", data)
    os.posix_fadvise(fd := os.open(f"{d}/f", os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    equal(os.read(fd, len(data)) == data, True)
    equal(os.pread(fd, 100, len(data) - 10), data[-10:])
    equal(os.pread(fd, 100, len(data)), b"")
    os.close(fd)


@test
def test_random_writes(d):
    """Random writes and truncations, compared with a model in memory."""
    rng, model = random.Random(7), bytearray()
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    for step in range(400):
        offset, size = rng.randrange(300_000), rng.randrange(1, 70_000)
        if step % 10 == 9:
            os.ftruncate(fd, offset)
            del model[offset:]
            model.extend(bytes(offset - len(model)))
        else:
            data = rng.randbytes(size)
            os.pwrite(fd, data, offset)
            model.extend(bytes(max(0, offset + size - len(model))))
            model[offset : offset + size] = data
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    equal(os.fstat(fd).st_size, len(model))
    assert read(f"{d}/f") == bytes(model)
    os.close(fd)


@test
def test_direct_io(d):
    # Fill the buffer before use: for pages that were never written UML gives the device the kernel's zero page.
    buffer = mmap.mmap(-1, 1 << 20)
    data = pattern(1 << 20)
    buffer[:] = data
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    equal(os.pwritev(fd, [buffer], 0), 1 << 20)
    equal(os.pwritev(fd, [memoryview(buffer)[:4096]], 3 << 20), 4096)
    buffer[:] = b"\xff" * len(buffer)
    equal(os.preadv(fd, [buffer], 0), 1 << 20)
    assert buffer[:] == data
    equal(os.preadv(fd, [memoryview(buffer)[:8192]], 3 << 20), 4096)
    equal(buffer[:4096] == data[:4096], True)
    equal(os.fstat(fd).st_size, (3 << 20) + 4096)
    os.close(fd)
    assert read(f"{d}/f")[: 1 << 20] == data


@test
def test_append(d):
    one = os.open(f"{d}/f", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    two = os.open(f"{d}/f", os.O_WRONLY | os.O_APPEND)
    for turn in range(50):
        os.write(one, b"a%03d\n" % turn)
        os.write(two, b"b%03d\n" % turn)
    equal(read(f"{d}/f"), b"".join(b"a%03d\nb%03d\n" % (turn, turn) for turn in range(50)))


@test
def test_truncate(d):
    write(f"{d}/f", b"0123456789")
    os.truncate(f"{d}/f", 4)
    os.truncate(f"{d}/f", 8)
    equal(read(f"{d}/f"), b"0123\0\0\0\0")
    refused(EISDIR, os.truncate, d, 0)


@test
def test_fallocate(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * (1 << 20))
    off = ctypes.c_long
    call("fallocate", fd, 0, off(0), off(2 << 20))
    equal(os.fstat(fd).st_size, 2 << 20)
    call("fallocate", fd, FALLOC_KEEP_SIZE, off(2 << 20), off(1 << 20))
    equal(os.fstat(fd).st_size, 2 << 20)
    call("fallocate", fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, off(4096), off(8192))
    equal(os.pread(fd, 16384, 0), b"x" * 4096 + bytes(8192) + b"x" * 4096)
    try:
        call("fallocate", fd, FALLOC_ZERO_RANGE, off(65536), off(4096))
        equal(os.pread(fd, 8192, 65536 - 2048), b"x" * 2048 + bytes(4096) + b"x" * 2048)
    except OSError as error:
        equal(error.errno, EOPNOTSUPP)
    os.close(fd)


@test
def test_seek_hole_and_data(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4 << 20)
    os.pwrite(fd, b"x" * 4096, 1 << 20)
    os.fsync(fd)
    equal(os.lseek(fd, 0, os.SEEK_DATA), 1 << 20)
    equal(os.lseek(fd, 1 << 20, os.SEEK_HOLE), (1 << 20) + 4096)
    equal(os.lseek(fd, 0, os.SEEK_HOLE), 0)
    refused(ENXIO, os.lseek, fd, 2 << 20, os.SEEK_DATA)
    refused(ENXIO, os.lseek, fd, 4 << 20, os.SEEK_HOLE)
    os.close(fd)


@test
def test_file_over_4_gib(d):
    size = (5 << 30) + 12345
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    data = pattern(3 << 20)
    for offset in (0, (4 << 30) - (1 << 20), size):
        equal(os.pwrite(fd, data, offset), len(data))
    os.fsync(fd)
    os.close(fd)
    fd = os.open(f"{d}/f", os.O_RDWR)
    equal(os.fstat(fd).st_size, size + len(data))
    assert os.fstat(fd).st_blocks < 64 << 11
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in (0, (4 << 30) - (1 << 20), size):
        assert os.pread(fd, len(data), offset) == data
    equal(os.pread(fd, 4096, 3 << 30), bytes(4096))
    os.ftruncate(fd, 7 << 30)
    equal(os.stat(f"{d}/f").st_size, 7 << 30)
    os.close(fd)


@test
def test_copy_file_range(d):
    data = pattern(5 << 20)
    write(f"{d}/a", data)
    source, target = os.open(f"{d}/a", os.O_RDONLY), os.open(f"{d}/b", os.O_RDWR | os.O_CREAT)
    done = 0
    while part := os.copy_file_range(source, target, len(data), done, 100 + done):
        done += part
    equal(done, len(data))
    assert read(f"{d}/b") == bytes(100) + data
    equal(os.copy_file_range(source, target, 100, len(data) + 5), 0)
    equal(os.copy_file_range(target, target, 1000, 100, 3 << 20), 1000)
    equal(os.pread(target, 1000, 3 << 20) == data[:1000], True)


@test
def test_sendfile_and_splice(d):
    data = pattern(1 << 20)
    write(f"{d}/a", data)
    source, target = os.open(f"{d}/a", os.O_RDONLY), os.open(f"{d}/b", os.O_RDWR | os.O_CREAT)
    done = 0
    while part := os.sendfile(target, source, done, len(data)):
        done += part
    assert read(f"{d}/b") == data
    reader, writer = os.pipe()
    equal(os.splice(source, writer, 4096, offset_src=8192), 4096)
    equal(os.splice(reader, target, 4096, offset_dst=0), 4096)
    equal(os.pread(target, 4096, 0), data[8192 : 8192 + 4096])


@test
def test_mmap_shared(d):
    data = pattern(300_000)
    write(f"{d}/f", data)
    fd = os.open(f"{d}/f", os.O_RDWR)
    area = mmap.mmap(fd, len(data))
    assert area[:] == data
    area[100_000:100_010] = b"0123456789"
    area.flush()
    area[200_000:200_003] = b"abc"
    area.close()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    equal(os.pread(fd, 10, 100_000), b"0123456789")
    equal(os.pread(fd, 3, 200_000), b"abc")
    private = mmap.mmap(fd, len(data), flags=mmap.MAP_PRIVATE)
    private[0:3] = b"zzz"
    equal(os.pread(fd, 3, 0), data[:3])


@test
def test_exec(d):
    write(f"{d}/true", read("/usr/bin/true"), 0o755)
    write(f"{d}/script", b"#!/bin/sh\necho from the share\n", 0o755)
    equal(subprocess.run([f"{d}/true"]).returncode, 0)
    equal(subprocess.run([f"{d}/script"], capture_output=True).stdout, b"from the share\n")
    write(f"{d}/not", b"#!/bin/sh\n", 0o644)
    refused(EACCES, os.execv, f"{d}/not", ["not"])


@test
def test_rename(d):
    write(f"{d}/a", b"a")
    write(f"{d}/b", b"b")
    os.rename(f"{d}/a", f"{d}/b")
    equal((os.listdir(d), read(f"{d}/b")), (["b"], b"a"))
    os.makedirs(f"{d}/x/y")
    refused(EINVAL, os.rename, f"{d}/x", f"{d}/x/y/z")
    os.rename(f"{d}/b", f"{d}/x/y/b")
    os.rename(f"{d}/x/y", f"{d}/y")
    equal(read(f"{d}/y/b"), b"a")
    os.makedirs(f"{d}/full/file")
    os.mkdir(f"{d}/from")
    refused(ENOTEMPTY, os.rename, f"{d}/from", f"{d}/full")


@test
def test_rename_flags(d):
    write(f"{d}/a", b"a")
    os.mkdir(f"{d}/b")
    refused(EEXIST, renameat2, f"{d}/a", f"{d}/b", NOREPLACE)
    renameat2(f"{d}/a", f"{d}/b", EXCHANGE)
    equal(read(f"{d}/b"), b"a")
    assert os.path.isdir(f"{d}/a")
    renameat2(f"{d}/b", f"{d}/c", NOREPLACE)
    equal(read(f"{d}/c"), b"a")
    refused(ENOENT, renameat2, f"{d}/c", f"{d}/none", EXCHANGE)


@test
def test_rename_whiteout(d):
    write(f"{d}/a", b"a")
    renameat2(f"{d}/a", f"{d}/b", WHITEOUT)
    left = os.stat(f"{d}/a")
    assert stat.S_ISCHR(left.st_mode)
    equal((left.st_rdev, read(f"{d}/b")), (0, b"a"))


@test
def test_unlinked_but_open(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"before")
    os.unlink(f"{d}/f")
    os.write(fd, b" after")
    equal(os.pread(fd, 100, 0), b"before after")
    equal((os.fstat(fd).st_nlink, os.fstat(fd).st_size), (0, 12))
    os.ftruncate(fd, 3)
    os.fchmod(fd, 0o600)
    equal(stat.S_IMODE(os.fstat(fd).st_mode), 0o600)
    os.mkdir(f"{d}/sub")
    here = os.open(f"{d}/sub", os.O_RDONLY)
    os.rmdir(f"{d}/sub")
    equal(os.listdir(here), [])
    refused(ENOENT, os.open, "new", os.O_CREAT | os.O_WRONLY, dir_fd=here)


@test
def test_tmpfile(d):
    fd = os.open(d, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(fd, b"unnamed")
    equal(os.listdir(d), [])
    equal((os.fstat(fd).st_nlink, stat.S_IMODE(os.fstat(fd).st_mode)), (0, 0o640))
    call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(f"{d}/named"), 0x400)
    equal((read(f"{d}/named"), os.fstat(fd).st_nlink), (b"unnamed", 1))
    os.close(fd)
    fd = os.open(d, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    refused(ENOENT, call, "linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(f"{d}/no"), 0x400)
    os.close(fd)
    as_user(USER, GROUP, [], lambda: refused(EACCES, os.open, d, os.O_TMPFILE | os.O_RDWR, 0o600))


@test
def test_hard_links(d):
    write(f"{d}/a", b"a")
    os.link(f"{d}/a", f"{d}/b")
    a, b = os.stat(f"{d}/a"), os.stat(f"{d}/b")
    equal((a.st_ino, a.st_nlink), (b.st_ino, 2))
    write(f"{d}/b", b"through b")
    equal(read(f"{d}/a"), b"through b")
    os.unlink(f"{d}/a")
    equal(os.stat(f"{d}/b").st_nlink, 1)
    os.symlink("b", f"{d}/s")
    os.link(f"{d}/s", f"{d}/s2", follow_symlinks=False)
    equal(os.readlink(f"{d}/s2"), "b")
    refused(EPERM, os.link, d, f"{d}/dir")


@test
def test_symlinks(d):
    for target in ("x", "../" * 40 + "etc", "/etc/hostname", "é" * 100, "y" * 4095):
        os.symlink(target, f"{d}/l")
        equal(os.readlink(f"{d}/l"), target)
        equal(os.lstat(f"{d}/l").st_size, len(target.encode()))
        os.unlink(f"{d}/l")
    os.symlink("loop", f"{d}/loop")
    refused(ELOOP, os.stat, f"{d}/loop")
    os.symlink(d, f"{d}/self")
    write(f"{d}/self/f", b"there")
    equal(read(f"{d}/f"), b"there")


@test
def test_names(d):
    for name in (b"n" * 255, "ü".encode() * 127, b"\xff\xfe\x01", b"a\nb", b"-", b" ", b"\\", b"..."):
        path = os.fsencode(d) + b"/" + name
        write(path, name)
        equal((os.listdir(os.fsencode(d)), read(path)), ([name], name))
        os.rename(path, os.fsencode(d) + b"/" + name[::-1])
        os.unlink(os.fsencode(d) + b"/" + name[::-1])
    refused(ENAMETOOLONG, write, f"{d}/" + "n" * 256, b"")
    refused(ENAMETOOLONG, os.mkdir, f"{d}/" + "n" * 256)
    refused(ENAMETOOLONG, os.stat, f"{d}/" + "n" * 256)
    equal(os.statvfs(d).f_namemax, 255)


@test
def test_deep_path(d):
    here = os.open(d, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d" * 50, dir_fd=here)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    write(f"/proc/self/fd/{here}/leaf", b"deep")
    refused(ENAMETOOLONG, os.stat, d + ("/" + "d" * 50) * 100)
    for _ in range(100):
        below, here = here, os.open("..", os.O_RDONLY, dir_fd=here)
        os.close(below)
    equal(os.fstat(here).st_ino, os.stat(d).st_ino)


@test
def test_directory_of_5000(d):
    names = {f"entry-{number:05}" for number in range(5000)}
    for name in names:
        os.close(os.open(f"{d}/{name}", os.O_CREAT | os.O_WRONLY))
    listed = [entry.name for entry in os.scandir(d)]
    equal((len(listed), set(listed) == names), (5000, True))
    inodes = {entry.inode() for entry in os.scandir(d)}
    equal(inodes, {os.stat(f"{d}/{name}").st_ino for name in names})
    # An entry that exists before and after the unlinks is listed once. Nothing else appears.
    seen = []
    for entry in os.scandir(d):
        seen.append(entry.name)
        os.unlink(f"{d}/{entry.name}")
    equal((len(seen), set(seen) == names, os.listdir(d)), (5000, True, []))


@test
def test_directories(d):
    equal(os.stat(d).st_nlink, 2)
    os.makedirs(f"{d}/a/b")
    equal(os.stat(d).st_nlink, 3)
    refused(ENOTEMPTY, os.rmdir, f"{d}/a")
    refused(EEXIST, os.mkdir, f"{d}/a")
    refused(EISDIR, os.unlink, f"{d}/a")
    equal(os.stat(f"{d}/a/b/..").st_ino, os.stat(f"{d}/a").st_ino)
    kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in os.scandir(d)}
    equal(kinds, {"a": True})
    fd = os.open(d, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@test
def test_thousand_open_files(d):
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    fds = [os.open(f"{d}/{number}", os.O_RDWR | os.O_CREAT) for number in range(1000)]
    for number, fd in enumerate(fds):
        os.write(fd, b"%d" % number)
    for number, fd in enumerate(fds):
        os.unlink(f"{d}/{number}")
        equal(os.pread(fd, 10, 0), b"%d" % number)
        os.close(fd)


@test
def test_special_files(d):
    os.mkfifo(f"{d}/fifo")
    with Waiter(lambda: write(f"{d}/fifo", b"through", flags=os.O_WRONLY)):
        equal(read(f"{d}/fifo"), b"through")
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{d}/socket")
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"{d}/socket")
    client.send(b"hello")
    equal(server.accept()[0].recv(10), b"hello")
    refused(ENXIO, os.open, f"{d}/socket", os.O_RDWR)
    # Their names move and go as those of files do.
    os.rename(f"{d}/socket", f"{d}/moved")
    os.link(f"{d}/moved", f"{d}/socket")
    os.unlink(f"{d}/moved")
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"{d}/socket")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"{d}/datagrams")
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"one", f"{d}/datagrams")
    equal(datagrams.recv(10), b"one")
    os.unlink(f"{d}/datagrams")
    refused(ENXIO, os.open, f"{d}/fifo", os.O_WRONLY | os.O_NONBLOCK)
    os.chmod(f"{d}/fifo", 0o640)
    os.chown(f"{d}/fifo", USER, GROUP)
    got = os.stat(f"{d}/fifo")
    equal((oct(got.st_mode), got.st_uid, got.st_size), (oct(stat.S_IFIFO | 0o640), USER, 0))
    os.mknod(f"{d}/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    write(f"{d}/null", b"gone", flags=os.O_WRONLY)
    equal(read(f"{d}/null"), b"")
    os.mknod(f"{d}/block", stat.S_IFBLK | 0o600, os.makedev(259, 300))
    equal(os.stat(f"{d}/block").st_rdev, os.makedev(259, 300))
    types = {entry.name: stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) for entry in os.scandir(d)}
    due = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "null": stat.S_IFCHR, "block": stat.S_IFBLK}
    equal(types, due)
    as_user(USER, GROUP, [], lambda: refused(EPERM, os.mknod, "/tmp/x", stat.S_IFCHR | 0o666, os.makedev(1, 3)))


class Present:
    """The time between its creation and `has`, by the host's clock and by the guest's. With --writeback the guest sets times, and the
    clock of an emulated guest may be wrong by minutes."""

    def __init__(self, d):
        self.path = f"{d}/present"
        self.begin = self.look()

    def look(self):
        write(self.path, b"")
        host = os.stat(self.path).st_mtime
        os.unlink(self.path)
        return host, time.time()

    def has(self, moment):
        # A second more: `stat` prints whole ones, and the kernel's time stamps are up to 10 ms old.
        return any(begin - 1 <= moment <= end + 1 for begin, end in zip(self.begin, self.look()))


@test
def test_times(d):
    write(f"{d}/f", b"")
    os.utime(f"{d}/f", ns=(1_000_000_000_123_456_789, 2_000_000_000_987_654_321))
    got = os.stat(f"{d}/f")
    equal((got.st_atime_ns, got.st_mtime_ns), (1_000_000_000_123_456_789, 2_000_000_000_987_654_321))
    present = Present(d)
    os.utime(f"{d}/f")
    set_to = os.stat(f"{d}/f").st_mtime
    assert present.has(set_to), f"set to {set_to}, after {present.begin}"
    os.symlink("f", f"{d}/l")
    os.utime(f"{d}/l", (5, 6), follow_symlinks=False)
    equal((os.lstat(f"{d}/l").st_mtime, os.stat(f"{d}/f").st_mtime > 6), (6, True))
    before = os.stat(f"{d}/f").st_mtime_ns
    time.sleep(0.05)
    write(f"{d}/f", b"x")
    assert os.stat(f"{d}/f").st_mtime_ns > before
    assert os.stat(f"{d}/f").st_ctime_ns > before


@test
def test_birth_time(d):
    present = Present(d)
    write(f"{d}/f", b"")
    born = int(subprocess.run(["stat", "-c", "%W", f"{d}/f"], capture_output=True, check=True).stdout)
    assert present.has(born), f"born {born}, after {present.begin}"


@test
def test_owner_and_mode(d):
    write(f"{d}/f", b"")
    os.chown(f"{d}/f", 12345, 54321)
    os.chmod(f"{d}/f", 0o4711)
    got = os.stat(f"{d}/f")
    equal((got.st_uid, got.st_gid, stat.S_IMODE(got.st_mode)), (12345, 54321, 0o4711))
    os.symlink("f", f"{d}/l")
    os.lchown(f"{d}/l", 7, 8)
    equal((os.lstat(f"{d}/l").st_uid, os.stat(f"{d}/f").st_uid), (7, 12345))
    as_user(USER, GROUP, [], lambda: refused(EPERM, os.chown, f"{d}/f", USER, GROUP))
    as_user(USER, GROUP, [], lambda: refused(EPERM, os.chmod, f"{d}/f", 0o777))


@test
def test_permissions(d):
    os.chmod(d, 0o1777)
    write(f"{d}/private", b"", 0o600)
    write(f"{d}/sticky", b"", 0o666)
    os.chmod(f"{d}/sticky", 0o666)
    os.makedirs(f"{d}/closed/in", 0o700)
    os.chmod(f"{d}/closed", 0o700)

    def user():
        refused(EACCES, os.open, f"{d}/private", os.O_RDONLY)
        refused(EACCES, os.stat, f"{d}/closed/in")
        refused(EACCES, os.listdir, f"{d}/closed")
        refused(EPERM, os.unlink, f"{d}/sticky")
        write(f"{d}/sticky", b"w", flags=os.O_WRONLY)
        assert not os.access(f"{d}/private", os.R_OK)
        write(f"{d}/own", b"mine", 0o400)
        equal((os.stat(f"{d}/own").st_uid, os.stat(f"{d}/own").st_gid), (USER, GROUP))
        refused(EACCES, os.open, f"{d}/own", os.O_WRONLY)
        os.mkdir(f"{d}/dir")
        os.symlink("x", f"{d}/link")
        os.mkfifo(f"{d}/fifo")
        for name in ("dir", "link", "fifo"):
            equal(os.lstat(f"{d}/{name}").st_uid, USER)
        # The file is created without write permission and still written to.
        fd = os.open(f"{d}/read-only", os.O_CREAT | os.O_WRONLY, 0o444)
        os.write(fd, b"yes")
        os.close(fd)
        equal(read(f"{d}/read-only"), b"yes")

    as_user(USER, GROUP, [], user)


@test
def test_supplementary_groups(d):
    for name, mode in (("shared", 0o770), ("setgid", 0o2770)):
        os.mkdir(f"{d}/{name}")
        os.chown(f"{d}/{name}", 0, OTHER_GROUP)
        os.chmod(f"{d}/{name}", mode)

    def user():
        for name, group in (("shared", GROUP), ("setgid", OTHER_GROUP)):
            write(f"{d}/{name}/file", b"")
            os.mkdir(f"{d}/{name}/dir")
            os.symlink("x", f"{d}/{name}/link")
            os.mkfifo(f"{d}/{name}/fifo")
            for entry in ("file", "dir", "link", "fifo"):
                got = os.lstat(f"{d}/{name}/{entry}")
                equal((name, entry, got.st_uid, got.st_gid), (name, entry, USER, group))
        assert os.stat(f"{d}/setgid/dir").st_mode & stat.S_ISGID

    as_user(USER, GROUP, [OTHER_GROUP], user)
    as_user(USER, GROUP, [], lambda: refused(EACCES, write, f"{d}/shared/no", b""))


@test
def test_setuid_cleared(d):
    def make(name):
        write(f"{d}/{name}", b"x" * 100)
        os.chmod(f"{d}/{name}", 0o6777)

    def mode(name):
        return stat.S_IMODE(os.stat(f"{d}/{name}").st_mode)

    def write_in_place(name):
        write(f"{d}/{name}", b"y", flags=os.O_WRONLY)

    actions = {
        "write": write_in_place,
        "truncate": lambda name: os.truncate(f"{d}/{name}", 5),
        "trunc": lambda name: write(f"{d}/{name}", b"", flags=os.O_WRONLY | os.O_TRUNC),
    }
    for name, action in actions.items():
        make(name)
        as_user(USER, GROUP, [], action, name)
        equal((name, oct(mode(name))), (name, oct(0o777)))
    # The file's group may not execute it. Its members keep the bit; others do not.
    for mode_before, left in ((0o2666, 0o666), (0o6746, 0o746)):
        make("fallocate")
        os.chmod(f"{d}/fallocate", mode_before)

        def allocate(name):
            fd = os.open(f"{d}/{name}", os.O_WRONLY)
            os.posix_fallocate(fd, 0, 5000)

        as_user(USER, GROUP, [], allocate, "fallocate")
        equal(oct(mode("fallocate")), oct(left))
        os.chmod(f"{d}/fallocate", mode_before)
        allocate("fallocate")
        equal(oct(mode("fallocate")), oct(mode_before))
    make("chown")
    os.chown(f"{d}/chown", 1, 1)
    equal(oct(mode("chown")), oct(0o777))
    make("root")
    write_in_place("root")
    equal(oct(mode("root")), oct(0o6777))


@test
def test_xattrs(d):
    f = f"{d}/f"
    write(f, b"")
    os.setxattr(f, "user.one", b"1")
    os.setxattr(f, "user.empty", b"")
    os.setxattr(f, "user.long", pattern(2000))
    due = {"user.one", "user.empty", "user.long"}
    equal({name for name in os.listxattr(f) if not name.startswith("security")}, due)
    equal((os.getxattr(f, "user.one"), os.getxattr(f, "user.empty")), (b"1", b""))
    equal(os.getxattr(f, "user.long"), pattern(2000))
    refused(EEXIST, os.setxattr, f, "user.one", b"2", os.XATTR_CREATE)
    refused(ENODATA, os.setxattr, f, "user.two", b"2", os.XATTR_REPLACE)
    refused(ENODATA, os.getxattr, f, "user.none")
    os.removexattr(f, "user.one")
    refused(ENODATA, os.removexattr, f, "user.one")
    as_user(USER, GROUP, [], lambda: refused(EACCES, os.setxattr, f, "user.no", b""))
    os.symlink("f", f"{d}/l")
    refused(EPERM, os.setxattr, f"{d}/l", "user.x", b"", follow_symlinks=False)
    os.setxattr(d, "user.dir", b"d")
    equal(os.getxattr(d, "user.dir"), b"d")


@test
def test_file_capabilities(d):
    write(f"{d}/f", read("/usr/bin/true"), 0o755)
    subprocess.run(["setcap", "cap_net_raw+ep", f"{d}/f"], check=True)
    shown = subprocess.run(["getcap", f"{d}/f"], capture_output=True, check=True).stdout
    assert b"cap_net_raw=ep" in shown, shown
    write(f"{d}/f", b"x", flags=os.O_WRONLY)
    refused(ENODATA, os.getxattr, f"{d}/f", "security.capability")


@test
def test_acls(d):
    def acl(*arguments):
        subprocess.run(["setfacl", *arguments], check=True)

    def shown(path):
        text = subprocess.run(["getfacl", "-cnp", path], capture_output=True, check=True).stdout.decode()
        return set(text.split())

    f = f"{d}/f"
    write(f, b"secret", 0o600)
    as_user(USER, GROUP, [], lambda: refused(EACCES, os.open, f, os.O_RDONLY))
    acl("-m", f"u:{USER}:r", f)

    def user():
        equal(read(f), b"secret")
        refused(EACCES, os.open, f, os.O_WRONLY)

    as_user(USER, GROUP, [], user)
    equal(oct(stat.S_IMODE(os.stat(f).st_mode)), oct(0o640))
    os.chmod(f, 0o600)
    as_user(USER, GROUP, [], lambda: refused(EACCES, os.open, f, os.O_RDONLY))
    os.mkdir(f"{d}/dir")
    acl("-dm", f"u:{USER}:rwx,g::rx,o::-", f"{d}/dir")
    os.umask(0o077)
    write(f"{d}/dir/file", b"", 0o666)
    os.mkdir(f"{d}/dir/sub", 0o777)
    os.mkfifo(f"{d}/dir/fifo", 0o666)
    assert f"user:{USER}:rwx" in shown(f"{d}/dir/file") or f"user:{USER}:rw-" in shown(f"{d}/dir/file")
    for name, mode in (("file", 0o660), ("sub", 0o770), ("fifo", 0o660)):
        equal((name, oct(stat.S_IMODE(os.stat(f"{d}/dir/{name}").st_mode))), (name, oct(mode)))
    assert f"default:user:{USER}:rwx" in shown(f"{d}/dir/sub")
    acl("-b", f)
    equal(len(shown(f)), 3)


@test
def test_locks(d):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)

    def other():
        mine = os.open(f"{d}/f", os.O_RDWR)
        refused(EAGAIN, fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 105)
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 110)
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1000, 0)
        kind, _, start, length, pid = struct.unpack("hhqqi4x", fcntl.fcntl(mine, fcntl.F_GETLK, asked))
        equal((kind, start, length), (fcntl.F_WRLCK, 100, 10))
        # The holder's, or none where the lock is the host's.
        assert pid in (os.getppid(), 0), pid
        refused(EWOULDBLOCK, fcntl.flock, mine, fcntl.LOCK_EX | fcntl.LOCK_NB)

    fcntl.flock(fd, fcntl.LOCK_SH)
    in_child(other)
    # Closing any descriptor of the file drops the process's POSIX locks.
    os.close(os.open(f"{d}/f", os.O_RDONLY))
    fcntl.flock(fd, fcntl.LOCK_UN)

    def free():
        mine = os.open(f"{d}/f", os.O_RDWR)
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)

    in_child(free)
    # The locks of a process that ended are free.
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@test
def test_ofd_locks(d):
    def lock(fd, kind):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))

    one, two = (os.open(f"{d}/f", os.O_RDWR | os.O_CREAT) for _ in range(2))
    lock(one, fcntl.F_WRLCK)
    refused(EAGAIN, lock, two, fcntl.F_WRLCK)
    os.close(one)
    lock(two, fcntl.F_WRLCK)


def waiting_lock(d, lock, unlock):
    fd = os.open(f"{d}/f", os.O_RDWR | os.O_CREAT)
    lock(fd)

    def wait():
        lock(os.open(f"{d}/f", os.O_RDWR))

    waiters = [Waiter(wait) for _ in range(8)]
    assert not waiters[0].done_within(0.5)
    start = time.monotonic()
    for number in range(100):
        write(f"{d}/{number}", b"x")
        equal(read(f"{d}/{number}"), b"x")
        assert not os.path.exists(f"{d}/none-{number}")
    # 60 s for what takes a second: an emulated guest on a busy machine.
    assert time.monotonic() - start < 60
    assert not any(waiter.done_within(0) for waiter in waiters)
    unlock(fd)
    for _ in waiters:
        ready, _, _ = select.select([waiter.reader for waiter in waiters], [], [], 30)
        assert ready, "the lock is free, but no process got it"
        waiter = next(waiter for waiter in waiters if waiter.reader in ready)
        assert waiter.done_within(0)
        waiter.__exit__()
        waiters.remove(waiter)


@test
def test_waiting_posix_locks(d):
    waiting_lock(d, lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), lambda fd: fcntl.lockf(fd, fcntl.LOCK_UN))


@test
def test_waiting_flocks(d):
    waiting_lock(d, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN))


@test
def test_posix_deadlock(d):
    """Of two processes that would wait for each other, one gets EDEADLK."""
    write(f"{d}/f", b"12")

    def lock(first, second):
        fd = os.open(f"{d}/f", os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, first)
        write(f"{d}/holds-{first}", b"")
        while not os.path.exists(f"{d}/holds-{second}"):
            time.sleep(0.05)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, second)
        except OSError as error:
            equal(error.errno, EDEADLK)
            write(f"{d}/told-{first}", b"")

    with Waiter(lambda: lock(0, 1)) as one, Waiter(lambda: lock(1, 0)) as two:
        assert one.done_within(10) and two.done_within(10), "both wait forever"
    equal(len([name for name in os.listdir(d) if name.startswith("told")]), 1)


@test
def test_statfs_and_sync(d):
    got = os.statvfs(d)
    assert got.f_blocks > 0 and got.f_bsize > 0
    write(f"{d}/f", b"x" * 10_000)
    fd = os.open(f"{d}/f", os.O_RDWR)
    os.fdatasync(fd)
    os.fsync(fd)
    call("syncfs", fd)
    os.sync()


@test
def test_poll_and_ioctl(d):
    write(f"{d}/f", b"x")
    fd = os.open(f"{d}/f", os.O_RDWR)
    poller = select.poll()
    poller.register(fd, select.POLLIN | select.POLLOUT)
    equal(poller.poll(1000), [(fd, select.POLLIN | select.POLLOUT)])
    equal(struct.unpack("i", fcntl.ioctl(fd, 0x541B, b"\0" * 4))[0], 1)
    # Some that the host's file system would serve: a file's version, its encryption, its place on the disk.
    for request in (0x12345678, 0x80087601, 0x400C6615, 0xC0105887):
        refused(ENOTTY, fcntl.ioctl, fd, request, b"\0" * 64)


@test
def test_file_flags(d):
    """lsattr, chattr, and what they call."""

    def flags(path, change=0):
        fd = os.open(path, os.O_RDONLY)
        try:
            now = struct.unpack("Q", fcntl.ioctl(fd, GETFLAGS, b"\0" * 8))[0]
            if change:
                fcntl.ioctl(fd, SETFLAGS, struct.pack("Q", now ^ change))
            return now
        finally:
            os.close(fd)

    def attributes(path, **change):
        fd = os.open(path, os.O_RDONLY)
        try:
            fields = dict(zip(("xflags", "extsize", "nextents", "projid"), struct.unpack("4I12x", fcntl.ioctl(fd, FSGETXATTR, b"\0" * 28))))
            if change:
                fcntl.ioctl(fd, FSSETXATTR, struct.pack("4I12x", *(fields | change).values()))
            return fields
        finally:
            os.close(fd)

    def chattr(change, path):
        done = subprocess.run(["chattr", change, path], capture_output=True, text=True)
        if done.returncode:
            raise OSError(EPERM if "not permitted" in done.stderr else EOPNOTSUPP, done.stderr)

    def shown(path, *options):
        return subprocess.run(["lsattr", "-d", *options, path], capture_output=True, check=True, text=True).stdout.split()

    file, directory = f"{d}/f", f"{d}/d"
    write(file, b"x")
    os.chown(file, USER, GROUP)
    os.mkdir(directory)
    first = {path: flags(path) for path in (file, directory)}
    for path in first:
        for letter, flag in (("d", NODUMP_FL), ("A", NOATIME_FL)):
            chattr(f"+{letter}", path)
            assert letter in shown(path)[0]
            equal(flags(path), first[path] | flag)
            chattr(f"-{letter}", path)
            assert letter not in shown(path)[0]
        equal(flags(path), first[path])
        for letter in "iaP":
            refused(EPERM, chattr, f"+{letter}", path)
        for flag in (IMMUTABLE_FL, APPEND_FL, PROJINHERIT_FL):
            refused(EPERM, flags, path, flag)
        for flag in (NOCOW_FL, DAX_FL):
            refused(EOPNOTSUPP, flags, path, flag)
        equal(flags(path), first[path])
        attributes(path, xflags=attributes(path)["xflags"] | 0x80)
        equal((flags(path), attributes(path)["xflags"] & 0x80), (first[path] | NODUMP_FL, 0x80))
        equal(shown(path, "-p")[0], str(attributes(path)["projid"]))
        refused(EPERM, attributes, path, projid=attributes(path)["projid"] + 7)
        flags(path, NODUMP_FL)
    chattr("+D", directory)
    equal(flags(directory), first[directory] | DIRSYNC_FL)
    # By a descriptor of a file without a name too.
    fd = os.open(file, os.O_RDWR)
    os.unlink(file)
    fcntl.ioctl(fd, SETFLAGS, struct.pack("Q", first[file] | NOATIME_FL))
    equal(struct.unpack("Q", fcntl.ioctl(fd, GETFLAGS, b"\0" * 8))[0], first[file] | NOATIME_FL)
    os.close(fd)
    write(file, b"x")
    os.chown(file, USER, GROUP)
    as_user(USER, GROUP, [], flags, file, NODUMP_FL)
    equal(flags(file), first[file] | NODUMP_FL)
    as_user(USER + 1, GROUP, [], lambda: refused(EPERM, flags, file, NODUMP_FL))
    os.mkfifo(f"{d}/fifo")
    fd = os.open(f"{d}/fifo", os.O_RDWR)
    refused(ENOTTY, fcntl.ioctl, fd, GETFLAGS, b"\0" * 8)


@test
def test_no_space_left_behind(d):
    """Removing a file frees its blocks at once, even if it was open before."""
    # Not zeroes: see test_direct_io.
    write(f"{d}/f", b"x" * (64 << 20))
    os.sync()
    before = os.statvfs(d).f_bfree
    os.unlink(f"{d}/f")
    # 10 s: RELEASE is sent after close(2) returns. 32 MiB: other processes use the disk meanwhile.
    for _ in range(100):
        if (os.statvfs(d).f_bfree - before) * os.statvfs(d).f_frsize > 32 << 20:
            return
        time.sleep(0.1)
    raise AssertionError("the blocks are not free")


@test
def test_idmapped_mount(d):
    os.mkdir(f"{d}/in")
    os.mkdir("/tmp/mapped")
    write(f"{d}/in/root", b"")
    done = subprocess.run(
        ["mount", "--bind", "-o", "X-mount.idmap=b:0:100000:65536", f"{d}/in", "/tmp/mapped"], capture_output=True
    )
    if done.returncode:
        raise Skip("no idmapped mounts: " + done.stderr.decode().strip().splitlines()[0])
    try:
        equal(os.stat("/tmp/mapped/root").st_uid, 100000)
        os.chmod(f"{d}/in", 0o777)
        as_user(101000, 101000, [], lambda: write("/tmp/mapped/new", b"", 0o600))
        equal((os.stat("/tmp/mapped/new").st_uid, os.stat(f"{d}/in/new").st_uid), (101000, 1000))

        def unnamed():
            fd = os.open("/tmp/mapped", os.O_TMPFILE | os.O_RDWR, 0o600)
            equal(os.fstat(fd).st_uid, 101000)
            os.write(fd, b"unnamed")
            named = os.fsencode("/tmp/mapped/named")
            call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, named, 0x400)

        as_user(101000, 101000, [], unnamed)
        equal((os.stat(f"{d}/in/named").st_uid, read(f"{d}/in/named")), (1000, b"unnamed"))
        # Who has no id there owns nothing there: as on any other file system.
        as_user(1000, 1000, [], lambda: refused(EOVERFLOW, os.open, "/tmp/mapped", os.O_TMPFILE | os.O_RDWR, 0o600))
    finally:
        subprocess.run(["umount", "/tmp/mapped"], check=True)


@test
def test_parallel_processes(d):
    """Eight processes create, fill, rename, list and remove files in one directory."""

    def work(number):
        rng = random.Random(number)
        for turn in range(60):
            name = f"{d}/{number}-{turn}"
            data = rng.randbytes(rng.randrange(1, 40_000))
            write(name, data)
            os.rename(name, name + "x")
            assert read(name + "x") == data
            os.listdir(d)
            os.setxattr(name + "x", "user.n", b"1")
            os.unlink(name + "x")

    with_each = [Waiter(lambda number=number: work(number)) for number in range(8)]
    for waiter in with_each:
        assert waiter.done_within(200), "a process failed"
        waiter.__exit__()
    settle(d)
    equal(os.listdir(d), [])


@test
def test_left_for_the_host(d):
    """Leaves files whose checksums the host compares."""
    keep = os.path.join(os.path.dirname(d), "kept")
    os.mkdir(keep)
    sums = ""
    rng = random.Random(3)
    for number in range(20):
        data = rng.randbytes(rng.randrange(200_000))
        write(f"{keep}/{number}", data)
        import hashlib

        sums += f"{hashlib.sha256(data).hexdigest()}  {number}\n"
    fd = os.open(f"{keep}/0", os.O_RDWR)
    os.ftruncate(fd, 100_000)
    area = mmap.mmap(fd, 100_000)
    area[:] = pattern(100_000)
    area.flush()
    area.close()
    sums = f"{hashlib.sha256(pattern(100_000)).hexdigest()}  0\n" + sums.split("\n", 1)[1]
    write(f"{keep}/SHA256SUMS", sums.encode())


if os.path.exists("/host/thruway-guest"):
    from window import start_agent

    start_agent()
main("functional", sys.argv[1], sys.argv[2:])
