#!/usr/bin/env python3
"""Every kind of notification, sent by tests/host/notifier.py on command. The device lets the guest keep everything for an hour, so a
change is seen by its notification alone."""

import os
import subprocess
import sys
import time

sys.path.insert(0, "/host")
from check import equal, read

MOUNT = "/mnt/n"
# A limit on hangs, in seconds.
LIMIT = 60
sentinel = 0


def at(name):
    return os.path.join(MOUNT, name)


def tell(*words):
    """Gives the device a command."""
    try:
        os.lstat(at("@" + " ".join(map(str, words))))
    except FileNotFoundError:
        return
    raise AssertionError("a command is no file")


def until(function, due):
    """Waits until the function returns this."""
    end = time.monotonic() + LIMIT
    while (got := function()) != due:
        assert time.monotonic() < end, f"{str(got)[:200]}, expected {str(due)[:200]}"
        time.sleep(0.01)


def size(name):
    return os.stat(at(name)).st_size


def number(name):
    try:
        return os.stat(at(name)).st_ino
    except FileNotFoundError:
        return None


def logged(line):
    return line in read(at("log")).decode().splitlines()


def settle():
    """Returns when the guest has handled all notifications that the device was told to send so far: they are handled in order."""
    global sentinel
    sentinel += 1
    size("s")
    tell("set", 6, "s" * sentinel)
    tell("inval_inode", 6, -1)
    until(lambda: size("s"), sentinel)


def attributes():
    tell("set", 2, "hello")
    tell("inval_inode", 2)
    until(lambda: (size("f"), read(at("f"))), (5, b"hello"))
    # After a read the guest asks for the access time.
    size("f")
    tell("set", 2, "longer-text")
    equal(size("f"), 5)
    tell("inval_inode", 2, -1)
    until(lambda: size("f"), 11)


def contents():
    tell("inval_inode", 2)
    until(lambda: read(at("f")), b"longer-text")
    tell("set", 2, "LONGER-TEXT")
    equal(read(at("f")), b"longer-text")
    # Attributes alone: the pages stay.
    tell("inval_inode", 2, -1)
    settle()
    equal(read(at("f")), b"longer-text")
    tell("inval_inode", 2, 0, 0)
    until(lambda: read(at("f")), b"LONGER-TEXT")


def names():
    equal(number("f"), 2)
    tell("link", 1, "f", 5)
    equal(number("f"), 2)
    tell("inval_entry", 1, "f")
    until(lambda: number("f"), 5)
    # Without FUSE_EXPIRE_ONLY, and back.
    tell("link", 1, "f", 2)
    tell("inval_entry", 1, "f", 0)
    until(lambda: number("f"), 2)
    # What is mounted stays with FUSE_EXPIRE_ONLY.
    equal(number("d"), 3)
    subprocess.run(["mount", "-t", "tmpfs", "none", at("d")], check=True)
    tell("inval_entry", 1, "d")
    settle()
    assert os.path.ismount(at("d"))
    subprocess.run(["umount", at("d")], check=True)
    equal(number("d"), 3)


def deletion():
    equal(number("d/x"), 4)
    tell("unlink", 3, "x")
    equal(number("d/x"), 4)
    # Another node: nothing happens.
    tell("delete", 3, 5, "x")
    settle()
    tell("delete", 3, 4, "x")
    until(lambda: number("d/x"), None)
    tell("link", 3, "x", 4)
    until(lambda: number("d/x"), 4)


def stored_contents():
    tell("inval_inode", 5)
    settle()
    equal(read(at("g")), b"other\n")
    tell("store", 5, 0, "OTHER")
    until(lambda: read(at("g")), b"OTHER\n")
    tell("forget_log")
    tell("retrieve", 5, 0, 6)
    until(lambda: logged("retrieved 5 0 OTHER"), True)


def epochs():
    tell("link", 1, "f", 5)
    equal(number("f"), 2)
    tell("inc_epoch")
    until(lambda: number("f"), 5)
    tell("link", 1, "f", 2)
    tell("inc_epoch")
    until(lambda: number("f"), 2)


def pruning():
    equal(number("d/x"), 4)
    tell("forget_log")
    tell("prune", 4)
    until(lambda: logged("forget 4"), True)
    equal(number("d/x"), 4)


def resending():
    """The driver cannot do this, and says so in the kernel's log."""
    tell("resend")
    settle()


def malformed():
    tell("malformed")
    settle()
    tell("inval_inode", 2)
    tell("inval_inode", 5)
    settle()
    equal((number("f"), number("d"), number("d/x")), (2, 3, 4))
    equal((read(at("f")), read(at("g"))), (b"LONGER-TEXT", b"other\n"))


def floods():
    """Many more than there are buffers."""
    tell("flood", 20000)
    settle()


def overtaken():
    """A reply that a notification has overtaken is used once, although it says that it holds for an hour."""
    lookup, getattr = 1, 3
    tell("forget_log")
    # Of a node: its attributes.
    tell("inval_inode", 2, -1)
    settle()
    before = size("f")
    tell("inval_inode", 2, -1)
    settle()
    tell("overtake", getattr, 2, "set", 2, "o" * (before + 1), ",", "inval_inode", 2, -1)
    size("f")
    equal(size("f"), before + 1)
    # Of a node that the guest does not know before the reply.
    tell("set", 20, "x")
    tell("link", 3, "late", 20)
    tell("overtake", lookup, 3, "set", 20, "longer", ",", "inval_inode", 20, -1)
    size("d/late")
    equal(size("d/late"), 6)
    # Of a name that is asked for again. Without an open file the guest would forget a name that is no longer valid. Then it would
    # look it up with the directory locked, and no notification for the name could overtake the reply.
    fd = os.open(at("d/x"), os.O_RDONLY)
    equal(number("d/x"), 4)
    tell("inval_entry", 3, "x")
    settle()
    tell("overtake", lookup, 3, "link", 3, "x", 5, ",", "inval_entry", 3, "x")
    number("d/x")
    equal(number("d/x"), 5)
    os.close(fd)
    tell("link", 3, "x", 4)
    tell("inval_entry", 3, "x")
    until(lambda: number("d/x"), 4)
    # In time: the driver had handled each notification before the reply came.
    equal([line for line in read(at("log")).decode().splitlines() if line.startswith("overtook")], ["overtook"] * 3)


def everything():
    tests = attributes, contents, names, deletion, stored_contents, epochs, pruning, resending, malformed, floods, overtaken
    for test in tests:
        test()
        print("ok", test.__name__, flush=True)


def mount():
    subprocess.run(["mount", "-t", "virtiofs", "n", MOUNT], check=True)


everything()
# Another session, and another life of the driver.
subprocess.run(["umount", MOUNT], check=True)
mount()
attributes()
subprocess.run(["umount", MOUNT], check=True)
drivers = "/sys/bus/virtio/drivers/virtiofs"
device = next(name for name in os.listdir(drivers) if name.startswith("virtio"))
for action in ("unbind", "bind"):
    with open(f"{drivers}/{action}", "w", encoding="ascii") as file:
        file.write(device)
mount()
everything()
# The device goes while notifications come.
tell("flood", 20000)
subprocess.run(["umount", MOUNT], check=True)
with open(f"{drivers}/unbind", "w", encoding="ascii") as file:
    file.write(device)
print("ok unbind", flush=True)
