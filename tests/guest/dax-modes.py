#!/usr/bin/python3
"""Which files are mapped in which mode, in the shares s and readonly: dax-modes.py."""

import json
import os
import random
import sys

sys.path.insert(0, "/host")
from window import *

EROFS = errno.EROFS
# For a --dax-min-size of 2 MiB.
SIZES = {"empty": 0, "small": 1 << 20, "large": 4 << 20, "executable": 4 << 20}


def made_by_host():
    for name, size in SIZES.items():
        write(f"{MEET}/{name}", pattern(size), 0o755 if name == "executable" else 0o644)
        host(f"cp -p ../meet/{name} . && cp -p ../meet/{name} ../readonly")


def setups():
    return host_number("requests s SETUPMAPPING")


def shown(mode, dax):
    """The control socket says what is mapped."""
    with open(f"{S}/large", "rb") as file, mapped(f"{S}/large", SIZES["large"]):
        file.read(1)
        window, mappings = json.loads(host("control s status"))["dax"], json.loads(host("control s mappings"))
    equal((window["on"], len(mappings["dax"]) > 0), (mode != "never", len(dax) > 0))
    equal([mapping["kind"] for mapping in mappings["dax"]], ["through"] * window["mappings"])


def look(tag, mode, dax):
    """Checks that statx reports DAX for exactly these files, and that they are read and mapped accordingly."""
    mount(tag, mode)
    assert not is_dax(f"/mnt/{tag}"), "a directory is DAX"
    for name, size in SIZES.items():
        path = f"/mnt/{tag}/{name}"
        equal((name, is_dax(path)), (name, name in dax))
        before = setups() if tag == "s" else 0
        assert read(path) == read_mapped(path) == pattern(size), f"{name}: other contents"
        if tag == "s":
            equal((name, setups() > before), (name, name in dax and size > 0))
    if tag == "s":
        shown(mode, dax)
    umount(tag)


def grown():
    """A small file that grows is mapped once the guest has dropped its inode."""
    mount("s", "inode")
    path = f"{S}/grown"
    write(path, pattern(4096))
    assert not is_dax(path), "a small file is DAX"
    write(path, pattern(4 << 20), flags=os.O_WRONLY)
    drop_caches()
    os.listdir(S)
    time.sleep(SETTLED)
    assert is_dax(path), "a file that has grown is not DAX"
    assert read(path) == read_mapped(path) == pattern(4 << 20)
    umount("s")


def readonly(mode):
    mount("readonly", mode)
    path = "/mnt/readonly/large"
    refused(EROFS, os.open, path, os.O_RDWR)
    refused(EROFS, os.truncate, path, 0)
    refused(EROFS, os.open, f"{path}-new", os.O_WRONLY | os.O_CREAT)
    due = pattern(SIZES["large"])
    with mapped(path, len(due)) as view:
        for page in range(0, len(due), 4096):
            assert view[page : page + 8] == due[page : page + 8], f"page {page >> 12} has other contents"
    umount("readonly")


def larger_than_the_window():
    """Random reads of twice the window: no more is mapped than stays mapped."""
    count, ranges, window = 16, 8, 64
    # The guest keeps a fifth of the window free.
    fit = (window - window // 5) // ranges
    host(f"truncate -s {2 * window * RANGE} whole; for i in $(seq {count}); do head -c {ranges * RANGE} /dev/zero | tr '\\0' $((i % 10)) >part$i; done")
    mount("s", "inode")
    assert not is_dax(f"{S}/whole"), "a file larger than the window is DAX"
    parts = [f"{S}/part{number}" for number in range(1, count + 1)]
    fds = [os.open(path, os.O_RDONLY) for path in parts]
    equal([is_dax(path) for path in parts], [number < fit for number in range(count)])
    before, removed = setups(), host_number("requests s REMOVEMAPPING")
    rng = random.Random(5)
    for _ in range(3000):
        number = rng.randrange(count)
        equal(os.pread(fds[number], 8, rng.randrange(ranges * RANGE - 8)), b"%d" % ((number + 1) % 10) * 8)
    made, removed = setups() - before, host_number("requests s REMOVEMAPPING") - removed
    equal((made, removed), (fit * ranges, 0))
    for fd in fds:
        os.close(fd)
    # What the guest has forgotten makes room for others.
    drop_caches()
    seen("room for the last file", lambda: is_dax(parts[-1]), True)
    umount("s")


mount("meet")
steps(
    (made_by_host,),
    (look, "s", "always", SIZES),
    (look, "s", "inode", ["large"]),
    (look, "s", None, ["large"]),
    (look, "s", "never", []),
    (look, "readonly", "always", SIZES),
    (look, "readonly", "inode", []),
    (grown,),
    (larger_than_the_window,),
    (readonly, "always"),
    (readonly, "inode"),
)
umount("meet")
