#!/usr/bin/python3
"""privileges.py DIRECTORY: set-user-ID and set-group-ID bits and file capabilities are lost as on the guest's tmpfs. With DIRECTORY/count
the script also writes there a thousand times."""

import itertools
import mmap
import os
import shutil
import stat
import subprocess
import sys

sys.path.insert(0, "/host")
from check import *

USER, GROUP = 1000, 1000
# CAP_NET_RAW, permitted and effective: VFS_CAP_REVISION_2 of include/uapi/linux/capability.h.
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
REFERENCE = "/tmp/reference"


def opened(flags, do):
    def run(path):
        fd = os.open(path, flags)
        try:
            do(fd)
        finally:
            os.close(fd)

    return run


def store(fd):
    with mmap.mmap(fd, 100) as mapped:
        mapped[0] = 7
        mapped.flush()


def copy(fd):
    os.copy_file_range(fd, fd, 10, 0, 50)


OPERATIONS = {
    "nothing": opened(os.O_RDWR, lambda fd: None),
    "write": opened(os.O_WRONLY, lambda fd: os.write(fd, b"y")),
    "append": opened(os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"y")),
    "direct": opened(os.O_WRONLY | os.O_DIRECT, lambda fd: os.write(fd, mmap.mmap(-1, 4096))),
    "O_TRUNC": opened(os.O_WRONLY | os.O_TRUNC, lambda fd: None),
    "truncate": lambda path: os.truncate(path, 5),
    "ftruncate": opened(os.O_WRONLY, lambda fd: os.ftruncate(fd, 5)),
    "fallocate": opened(os.O_WRONLY, lambda fd: os.posix_fallocate(fd, 0, 5000)),
    "copy_file_range": opened(os.O_RDWR, copy),
    "mmap": opened(os.O_RDWR, store),
    "chown": lambda path: os.chown(path, -1, GROUP),
    "chown to nobody": lambda path: os.chown(path, -1, -1),
}


def has_capability(path):
    try:
        return os.getxattr(path, "security.capability") == CAPABILITY
    except OSError:
        return False


def outcome(base, name, operation, mode, capable, by_user):
    """What the operation leaves of a file's mode and capabilities. The daemon's options do not matter."""
    path = f"{base}/{name}"
    write(path, b"x" * 100)
    os.chown(path, USER, GROUP)
    os.chmod(path, mode)
    if capable:
        try:
            os.setxattr(path, "security.capability", CAPABILITY)
        except OSError:
            return None
    # So that the guest knows the old mode.
    os.stat(path)
    try:
        if by_user:
            as_user(USER, GROUP, [], OPERATIONS[operation], path)
        else:
            OPERATIONS[operation](path)
        done = True
    except (OSError, AssertionError) as error:
        if "EINVAL" not in str(error) and "Invalid argument" not in str(error):
            raise
        done = False
    result = (oct(stat.S_IMODE(os.stat(path).st_mode)), has_capability(path), done)
    os.unlink(path)
    return result


def compare(d, by_user):
    wrong = []
    cases = itertools.product(OPERATIONS, (0o4777, 0o2775, 0o6755), (False, True))
    for number, (operation, mode, capable) in enumerate(cases):
        due, got = (outcome(base, f"f{number}", operation, mode, capable, by_user) for base in (REFERENCE, d))
        if got is None or due is None or (due[2], got[2]) != (True, True):
            continue
        if operation == "mmap" and due[1] and not got[1]:
            # What is stored in a mapping reaches the host as a write, which takes the capabilities away.
            due = (due[0], False, True)
        if capable and not by_user and mode & 0o6000 and got[:2] == (oct(mode & 0o777), False):
            # The guest asks in the same way to take away the capabilities and the bits.
            continue
        if got != due:
            wrong.append(f"{operation} by {'user' if by_user else 'root'}, {mode:o}, {capable=}: {got[:2]}, expected {due[:2]}")
    assert not wrong, "; ".join(wrong)


@test
def test_changes_by_a_user(d):
    compare(d, True)


@test
def test_changes_by_root(d):
    compare(d, False)


@test
def test_a_program_that_was_changed_runs_without_its_bits(d):
    """The guest's kernel must not go by the mode that it knew before the write."""
    path = f"{d}/id"
    shutil.copyfile("/usr/bin/id", path)
    os.chmod(path, 0o4777)

    def run_write_run():
        def runs_as():
            return int(subprocess.run([path, "-u"], capture_output=True, check=True).stdout)

        equal(runs_as(), 0)
        write(path, b"0", flags=os.O_WRONLY | os.O_APPEND)
        equal(runs_as(), USER)

    as_user(USER, GROUP, [], run_write_run)


os.makedirs(REFERENCE, exist_ok=True)
if os.path.isdir(f"{sys.argv[1]}/count"):
    target = os.open(f"{sys.argv[1]}/count/file", os.O_RDWR | os.O_CREAT, 0o644)
    for n in range(1000):
        os.pwrite(target, b"x" * 4096, n * 4096)
    print("counted", flush=True)
    sys.exit(0)
main(f"privileges {sys.argv[1]}", sys.argv[1])
