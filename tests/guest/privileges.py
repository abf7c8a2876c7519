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

USER, GROUP, OTHER_GROUP = 1000, 1000, 1001
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


def outcome(base, name, operation, mode, capable, group):
    """What the operation leaves of a file's mode and capabilities, by the file's owner with this group, or by root. The daemon's options
    do not matter."""
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
        if group:
            as_user(USER, group, [GROUP] if operation == "chown" else [], OPERATIONS[operation], path)
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


def surely_kept(operation, mode, capable, group):
    """Whether a set-group-ID bit that the group may not execute stays, as Linux has it for a member of the group."""
    if group != GROUP or operation == "chown to nobody":
        return False
    return "trunc" in operation.lower() or (not mode & 0o4000 and not capable)


def compare(d, group=None):
    wrong = []
    cases = itertools.product(OPERATIONS, (0o4777, 0o2775, 0o6755, 0o2644, 0o6744), (False, True))
    for number, (operation, mode, capable) in enumerate(cases):
        due, got = (outcome(base, f"f{number}", operation, mode, capable, group) for base in (REFERENCE, d))
        if got is None or due is None or (due[2], got[2]) != (True, True):
            continue
        if operation == "mmap" and due[1] and not got[1]:
            # What is stored in a mapping reaches the host as a write, which takes the capabilities away.
            due = (due[0], False, True)
        if capable and not group and mode & 0o6000 and got[:2] == (oct(mode & 0o777), False):
            # The guest asks in the same way to take away the capabilities and the bits.
            continue
        if mode & 0o2010 == 0o2000 and not surely_kept(operation, mode, capable, group):
            # docs/security.md: the guest does not say who changes the file.
            due, got = (((oct(int(r[0], 8) & ~0o2000)), *r[1:]) for r in (due, got))
        if got != due:
            by = f"group {group}" if group else "root"
            wrong.append(f"{operation} by {by}, {mode:o}, {capable=}: {got[:2]}, expected {due[:2]}")
    assert not wrong, "; ".join(wrong)


@test
def test_changes_by_a_member_of_the_group(d):
    compare(d, GROUP)


@test
def test_changes_by_others(d):
    compare(d, OTHER_GROUP)


@test
def test_changes_by_root(d):
    compare(d)


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
