#!/usr/bin/python3
"""The host executes files of the share: dax-programs.py MODE."""

import os
import sys

sys.path.insert(0, "/host")
from window import *

mode = sys.argv[1]
TXTBSY = errno.ETXTBSY


def matches(name):
    """The guest reads the host's contents with read(2) and through a mapping."""
    import hashlib

    due = host(f"sha256sum <{name}").split()[0]
    for how in read, read_mapped:
        assert hashlib.sha256(how(f"{S}/{name}")).hexdigest() == due, f"{name}: {how.__name__} gives other contents"


def executed_when_mapped():
    """The host executes a file that the guest has mapped and cached for reading."""
    host("cp /bin/sleep one")
    size = os.stat(f"{S}/one").st_size
    with mapped(f"{S}/one", size) as view:
        assert view[:4] == b"\x7fELF"
        host("./one 0")
        matches("one")
        host("./one 0")
        assert view[:4] == b"\x7fELF"
    host("./one 0")


def written_then_executed():
    """The host can execute what the guest has written and closed."""
    with mapped(f"{S}/one", os.stat(f"{S}/one").st_size) as view:
        data = view[:]
    write(f"{S}/two", data, mode=0o755)
    matches("two")
    host("./two 0")
    fd = os.open(f"{S}/two", os.O_RDWR)
    with mapped(f"{S}/two", len(data), writable=True) as view:
        view[: len(data)] = data
    os.close(fd)
    host("./two 0")
    matches("two")
    host("./two 0")


def read_while_executed():
    """The host executes a file before the guest looks at it, and meanwhile."""
    host("cp /bin/sleep three && { ./three 600 & echo $! >../meet/pid; }")
    matches("three")
    refused(TXTBSY, os.open, f"{S}/three", os.O_WRONLY)
    drop_caches()
    matches("three")
    # A copy is mapped here, so the host's changes of the file must still arrive.
    host("kill $(cat ../meet/pid)")
    deadline = time.monotonic() + 5
    while True:
        try:
            with mapped(f"{S}/three", os.stat(f"{S}/three").st_size, writable=True) as view:
                view[1:4] = b"flE"
            break
        except OSError as error:
            assert error.errno == TXTBSY and time.monotonic() < deadline, f"not writable any more: {error}"
            time.sleep(0.1)
    matches("three")
    if mode != "plain":
        equal(host("head -c 4 three | tail -c 3"), "flE")
    host("cp /bin/sleep three.new && mv three.new three && ./three 0")


mount("meet")
mount("s", None if mode == "plain" else mode)
steps((executed_when_mapped,), (written_then_executed,), (read_while_executed,))
umount("s")
umount("meet")
