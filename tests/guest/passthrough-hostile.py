#!/usr/bin/python3
"""The guest writes where it must not. Only its own files may suffer, and no process of the host."""

import os
import random
import sys

sys.path.insert(0, "/host")
from window import *

SIZE = 4 << 20
TABLE = 2 << 20


def device_of(tag):
    """The directory of the PCI device."""
    for name in os.listdir("/sys/bus/virtio/drivers/virtiofs"):
        try:
            if read(f"/sys/bus/virtio/drivers/virtiofs/{name}/tag").strip() == tag.encode():
                break
        except OSError:
            pass
    else:
        # The kernel's list of tags: /sys/fs/virtiofs/N/{tag,device}
        for number in os.listdir("/sys/fs/virtiofs"):
            if read(f"/sys/fs/virtiofs/{number}/tag").strip() == tag.encode():
                return os.path.realpath(f"/sys/fs/virtiofs/{number}/device/..")
    return os.path.realpath(f"/sys/bus/virtio/devices/{name}/..")


def regions():
    """All shared memory regions, as the guest's root can map them."""
    path = f"{device_of('s')}/resource4"
    fd = os.open(path, os.O_RDWR)
    size = os.fstat(fd).st_size
    view = mmap.mmap(fd, size)
    os.close(fd)
    return view, size


def entries(view, size):
    table = size - TABLE
    equal(view[table : table + 8], b"FUSE_WIN")
    for index in range(1, 4096):
        at = table + 64 * index
        if int.from_bytes(view[at + 4 : at + 8], "little"):
            yield index, at


def table_scribbled():
    """The daemon trusts nothing in the table. A file with a damaged entry is read by messages."""
    host(f"head -c {SIZE} /dev/urandom >victim; head -c {SIZE} /dev/urandom >other")
    due = host("sha256sum <victim; sha256sum <other").split()[::2]
    fd = os.open(f"{S}/victim", os.O_RDWR)
    before = os.pread(fd, 100, 0)
    view, size = regions()
    found = list(entries(view, size))
    assert found, "no entry is live: is the table there?"
    for index, at in found:
        # Another file's nodeid, a slot beyond the region, a huge size.
        view[at + 8 : at + 40] = b"\xff" * 32
    equal(os.pread(fd, 100, 0), before)
    equal(os.fstat(fd).st_size, SIZE)
    for index, at in found:
        view[at : at + 64] = os.urandom(64)
    for number in range(50):
        view[size - TABLE + 64 * random.randrange(1, 4096)] = random.randrange(256)
    os.close(fd)
    equal(read(f"{S}/other")[:0], b"")
    # Acknowledge revocations that never happened, and future ones.
    for index in range(1, 4096):
        at = size - TABLE + 64 * 4096 + 16 * index
        # It also says that it has stored to each slot and used it.
        view[at : at + 12] = b"\x05\0\0\0\x01\0\0\0\x01\0\0\0"
    for _ in range(5):
        host(f"truncate -s 100 victim && truncate -s {SIZE} victim")
    host("cat other >/dev/null; printf x >>other; truncate -s -1 other")
    view[size - TABLE : size - TABLE + 64] = bytes(64)
    view.close()
    equal(host("sha256sum <other").split()[0], due[1])


def a_new_session():
    """Starts with an intact table."""
    umount("s")
    mount("s")
    host(f"head -c {SIZE} /dev/urandom >victim")
    due = host("sha256sum <victim").split()[0]
    import hashlib

    before = host_number("requests s READ")
    equal(hashlib.sha256(read(f"{S}/victim")).hexdigest(), due)
    equal(host_number("requests s READ"), before)


def closed_files_are_out_of_reach():
    """When its slot belongs to another file, no data of a closed file is in the window."""
    secret = os.urandom(32)
    write(f"{MEET}/secret", secret)
    host(f"for i in $(seq 1000); do cat ../meet/secret; done >secret && chmod 600 secret")
    fd = os.open(f"{S}/secret", os.O_RDONLY)
    equal(os.pread(fd, 32, 0), secret)
    os.close(fd)
    host("rm secret")
    time.sleep(SETTLED)
    assert not os.path.exists(f"{S}/secret")
    drop_caches()
    # A worker of the kernel sends FORGET.
    time.sleep(1)
    view, size = regions()
    # Where nothing is mapped, reads give zeroes or ones: the host's page is not there.
    for at in range(0, size - TABLE, 4096):
        assert secret not in view[at : at + 64], f"the removed file's bytes are still at {at:#x}"
    view.close()


mount("meet")
mount("s")
steps((table_scribbled,), (a_new_session,), (closed_files_are_out_of_reach,))
umount("s")
umount("meet")
