#!/usr/bin/python3
"""The guest lets go of revoked files that no process touches, and of all when the device goes away: passthrough-idle.py FILES."""

import os
import signal
import sys
from contextlib import suppress

sys.path.insert(0, "/host")
from window import *

files = int(sys.argv[1])
# Four times this is more than a slot has: the file's size, as much again, and up to 2 MiB.
SIZE = 1 << 20
TABLE = 2 << 20
VALID, REVOKED = 1, 4


def device():
    """The directory of the virtio device of the share s."""
    for number in os.listdir("/sys/fs/virtiofs"):
        if read(f"/sys/fs/virtiofs/{number}/tag").strip() == b"s":
            return os.path.realpath(f"/sys/fs/virtiofs/{number}/device")
    raise AssertionError("no device s")


class Table:
    """The backing table. Nothing else shows whether an idle guest lets go: any access to a file makes it look."""

    def __init__(self):
        fd = os.open(f"{device()}/../resource4", os.O_RDWR)
        self.size = os.fstat(fd).st_size
        self.view = mmap.mmap(fd, TABLE, offset=self.size - TABLE)
        os.close(fd)
        equal(self.view[:8], b"FUSE_WIN")

    def word(self, at):
        return int.from_bytes(self.view[at : at + 4], "little")

    def revocations(self):
        return self.word(24)

    def live(self):
        """The generations of the live entries, by index."""
        flags = {index: self.word(64 * index + 4) for index in range(1, 4096)}
        return {index: self.word(64 * index + 48) for index, has in flags.items() if has & (VALID | REVOKED) == VALID}

    def acknowledged(self, index):
        return self.word(64 * 4096 + 16 * index)


def wait(what, done):
    """60 s: the guest looks for revocations every 100 ms, and the machine may be busy."""
    deadline = time.monotonic() + 60
    while not (got := done()):
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)
    return got


def idle_files_are_let_go_of():
    paths = [host_file(f"idle{number}", SIZE, number + 1) for number in range(files)]
    views = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            views.append(mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ))
    # All pages are mapped, so that nothing makes the guest look later.
    for number, view in enumerate(views):
        assert view[:] == pattern(SIZE, number + 1)
    table = Table()
    before, count = table.live(), table.revocations()
    equal(len(before), files)
    # They outgrow their slots, and the daemon may not map more, so they move. No process of the host waits for the guest, and the
    # daemon does so without a limit.
    for number in range(files):
        host(f"head -c {4 * SIZE} /dev/zero >>idle{number}")
    wait("the guest lets go of all files", lambda: all(table.acknowledged(at) >= old for at, old in before.items()))
    after = wait("all files have longer slots", lambda: len(now := table.live()) == files and now)
    assert all(after[index] > old for index, old in before.items()), f"generations {before}, then {after}"
    revoked = table.revocations() - count
    assert files <= revoked, f"{revoked} revocations of {files} files"
    for number, view in enumerate(views):
        assert view[:] == pattern(SIZE, number + 1)
        view.close()


def device_goes_away():
    """The driver lets go of the window and the table while a file is open and mapped."""
    path = host_file("unbound", SIZE)
    file = os.open(path, os.O_RDWR)
    view = mmap.mmap(file, SIZE)
    view[: SIZE // 2] = bytes(SIZE // 2)
    write("/sys/bus/virtio/drivers/virtiofs/unbind", os.path.basename(device()).encode(), flags=os.O_WRONLY)
    child = os.fork()
    if child == 0:
        # Not a page table entry is left.
        os._exit(view[0])
    equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), -signal.SIGBUS)
    try:
        os.pread(file, 1, 0)
    except OSError as error:
        print(f"a read of the file: {error}", flush=True)
    else:
        raise AssertionError("a read went on")
    view.close()
    with suppress(OSError):
        # Its FLUSH finds no device.
        os.close(file)


mount("meet")
mount("s")
steps((idle_files_are_let_go_of,), (device_goes_away,))
umount("s")
umount("meet")
