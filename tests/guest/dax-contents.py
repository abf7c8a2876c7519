#!/usr/bin/python3
"""Guest and host see the same contents, whoever writes: dax-contents.py MODE [whole]. "whole" also reads a sparse file in whole."""

import hashlib
import os
import sys
from contextlib import ExitStack

sys.path.insert(0, "/host")
from window import *

mode, whole = sys.argv[1], "whole" in sys.argv
SIZES = [0, 1, 4095, 4096, 4097, 5000, RANGE - 1, RANGE, RANGE + 1]
SPARSE = 3 << 30
# The end of a file is then a copy of the host's, and what is stored there reaches the host a moment later.
LARGER_PAGES = mmap.PAGESIZE > 4096


class File:
    def __init__(self, size):
        self.name = f"f{size}"
        self.path = f"{S}/{self.name}"
        self.model = bytearray(pattern(size, size + 1))

    def put(self, at, data):
        self.model[at : at + len(data)] = data

    def resize(self, size):
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def places(self):
        """Places to write to: the ends of the file, and both sides of each page or range border."""
        size = len(self.model)
        return sorted({at for at in (0, 4093, size // 2, RANGE - 3, size - 6) if 0 <= at <= size - 6})


files = [File(size) for size in SIZES]


def both_agree(step):
    if LARGER_PAGES:
        time.sleep(SETTLED)
    names = " ".join(file.name for file in files)
    sums = dict(reversed(line.split()) for line in host(f"sha256sum {names}").splitlines())
    sizes = dict(line.split() for line in host(f"stat -c '%n %s' {names}").splitlines())
    for file in files:
        where = f"{step}, {file.name}"
        size = len(file.model)
        assert int(sizes[file.name]) == size, f"{where}: {sizes[file.name]} bytes on the host, expected {size}"
        assert sums[file.name] == hashlib.sha256(file.model).hexdigest(), f"{where}: other contents on the host"
        equal((where, os.stat(file.path).st_size), (where, size))
        for how in read, read_mapped:
            got = how(file.path)
            assert got == file.model, f"{where}: {how.__name__} gives {difference(got, file.model)}"
    # Read again now that everything is mapped.
    equal(dict(line.split() for line in host(f"stat -c '%n %s' {names}").splitlines()), sizes)


def difference(got, due):
    if len(got) != len(due):
        return f"{len(got)} bytes, expected {len(due)}"
    at = next(at for at in range(len(due)) if got[at] != due[at])
    return f"{got[at:at + 8].hex()} at {at}, expected {due[at:at + 8].hex()}"


def each_by_host(command):
    """Runs a command on the host for each file, with its name and size."""
    host(" && ".join(command.format(name=file.name, size=len(file.model)) for file in files))


def made_by_host():
    for file in files:
        write(f"{MEET}/{file.name}", file.model)
    each_by_host("cp ../meet/{name} {name}")
    both_agree("made by the host")


def written():
    for file in files:
        fd = os.open(file.path, os.O_RDWR)
        for at in file.places():
            os.pwrite(fd, b"write2", at)
            file.put(at, b"write2")
        os.close(fd)
    both_agree("write(2)")


def written_mapped():
    """For a DAX file the host sees the change without a system call of the guest."""
    with ExitStack() as views:
        for file in files:
            if file.model:
                view = views.enter_context(mapped(file.path, len(file.model), writable=True))
                for at in file.places():
                    view[at : at + 6] = b"mapped"
                    file.put(at, b"mapped")
                if not is_dax(file.path):
                    view.flush()
        both_agree("mapped write")


def stored_privately():
    """The kernel copies the whole page, also what is past the end of the file."""
    for file in files:
        if size := len(file.model):
            with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE) as view:
                view[size - 1] ^= 0xFF
                equal(view[: size - 1], file.model[:-1])
    both_agree("private mapping")


def written_by_host():
    for file in files:
        places = file.places()
        if places:
            host(" && ".join(f"printf byhost | dd of={file.name} bs=1 seek={at} conv=notrunc status=none" for at in places))
        for at in places:
            file.put(at, b"byhost")
    time.sleep(SETTLED)
    both_agree("write by the host")


def appended():
    for file in files:
        data = pattern(5000, 77)
        write(file.path, data, flags=os.O_WRONLY | os.O_APPEND)
        file.model.extend(data)
    both_agree("append")


def truncated():
    for file in files:
        os.truncate(file.path, len(file.model) * 2 // 3)
        file.resize(len(file.model) * 2 // 3)
    both_agree("truncation")


def extended():
    """What a mapping writes past the end of the file does not appear when the file grows."""
    for file in files:
        size = len(file.model)
        if size % mmap.PAGESIZE:
            with mapped(file.path, size, writable=True) as view:
                past(view, size)
        os.truncate(file.path, size + 10_000)
        file.resize(size + 10_000)
    both_agree("extension")


def past(view, size):
    """Writes to the rest of the last page. Python's own bounds check does not allow that."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ctypes.memset(start + size, 0xFF, -size % mmap.PAGESIZE)


def appended_by_host():
    each_by_host("printf %05000d 1 >>{name}")
    for file in files:
        file.model.extend(b"%05000d" % 1)
    time.sleep(SETTLED)
    both_agree("append by the host")


def truncated_by_host():
    each_by_host("truncate -s $(({size} / 2)) {name}")
    for file in files:
        file.resize(len(file.model) // 2)
    time.sleep(SETTLED)
    both_agree("truncation by the host")


def extended_by_host():
    each_by_host("truncate -s +10000 {name}")
    for file in files:
        file.resize(len(file.model) + 10_000)
    time.sleep(SETTLED)
    both_agree("extension by the host")


def made_anew():
    for number, file in enumerate(files):
        file.model = bytearray(pattern(SIZES[-1 - number], 99 + number))
        write(file.path, file.model)
    both_agree("O_TRUNC and write(2)")
    for file in files:
        os.unlink(file.path)


def sparse():
    """A file of 3 GiB with data at a few places."""
    places = [0, RANGE - 4, RANGE + 4096, (1 << 30) - 4, (2 << 30) - 4, (2 << 30) + 5 * RANGE, SPARSE - 8]
    path = f"{S}/sparse"
    host(f"truncate -s {SPARSE} sparse && "
         + " && ".join(f"printf %08d {at % 9999} | dd of=sparse bs=1 seek={at} conv=notrunc status=none" for at in places))
    with mapped(path, SPARSE, writable=True) as view:
        fd = os.open(path, os.O_RDWR)
        for at in places:
            equal((at, view[at : at + 8], os.pread(fd, 8, at)), (at, b"%08d" % (at % 9999), b"%08d" % (at % 9999)))
            equal((at, view[at // 2 + 64 : at // 2 + 72]), (at, bytes(8)))
            view[at : at + 4] = b"mapp"
            os.pwrite(fd, b"writ", at + 4)
        os.close(fd)
        dax = is_dax(path)
        if not dax or LARGER_PAGES:
            view.flush()
        for at in places:
            equal(host(f"dd if=sparse bs=1 skip={at} count=8 status=none"), "mappwrit")
    size, blocks = host("stat -c '%s %b' sparse").split()
    equal(int(size), SPARSE)
    # 2,000 blocks of 512 bytes: 7 pages of data and the file system's metadata.
    # A range that is stored to in place is allocated in whole, since the store itself must not fail.
    ranges = {byte // RANGE for at in places for byte in (at, at + 7)} if dax else ()
    assert int(blocks) < 2000 + len(ranges) * RANGE // 512, f"the holes are filled: {blocks} blocks"
    if whole:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(RANGE):
                digest.update(data)
                if file.tell() % (256 << 20) == 0:
                    print(f"{file.tell() >> 20} MiB read", flush=True)
        equal(host("sha256sum <sparse", 300).split()[0], digest.hexdigest())
    os.unlink(path)


mount("meet")
mount("s", None if mode == "plain" else mode)
steps(*[(step,) for step in (
    made_by_host, written, written_mapped, stored_privately, written_by_host, appended, truncated, extended, appended_by_host,
    truncated_by_host, extended_by_host, made_anew, sparse,
)])
umount("s")
umount("meet")
