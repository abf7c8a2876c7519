#!/usr/bin/env python3
"""What a VMM and a guest do to the device besides using it: frontend.py, at each boot."""

import sys

sys.path.insert(0, "/host")
import window
from window import *

mount("meet")
boot = sum(name.startswith("boot-") for name in os.listdir(MEET)) + 1
write(f"{MEET}/boot-{boot}", b"")
window.asked = sum(name.endswith(".ask") for name in os.listdir(MEET))
# Bytes of a record.
RECORD = 14
KEXEC_FILE_LOAD, REBOOT_KEXEC = 320, 0x45584543


def record():
    """Adds a line to the log. Those before it are as they were written."""
    with open(f"{S}/log", "r+b", buffering=0) as log:
        number = os.fstat(log.fileno()).st_size // RECORD
        if number:
            equal(os.pread(log.fileno(), RECORD, (number - 1) * RECORD), b"record %06d\n" % number)
        os.pwrite(log.fileno(), b"record %06d\n" % (number + 1), number * RECORD)
        os.fsync(log.fileno())


def the_log_is_whole():
    lines = host("cat log").splitlines()
    equal(lines, [f"record {number + 1:06}" for number in range(len(lines))])


def until_gone():
    """As record(), until the device is gone."""
    try:
        while True:
            record()
    except OSError as error:
        assert error.errno in (errno.ENOTCONN, errno.EIO, errno.ECONNABORTED), error
        os._exit(0)


def wait_rounds(busy, count):
    start = busy.rounds()
    deadline = time.monotonic() + SEEN
    while busy.rounds() < start + count:
        assert time.monotonic() < deadline, "nothing goes on"
        time.sleep(0.01)


def use():
    """Files that the guest has open, one of them without a name, and a lock. Returns their descriptors."""
    write(f"{S}/removed", b"1")
    held = [os.open(f"{S}/{name}", os.O_RDWR) for name in ("log", "removed")] + [os.open(S, os.O_RDONLY)]
    os.unlink(f"{S}/removed")
    call("flock", held[0], 2)
    return held


def holds():
    """How many open files and directories of the guest the daemon has."""
    return host_number("control s metrics | sed -n 's/^thruway_handles //p'")


def mount_again():
    def tried():
        return subprocess.run(["mount", "-t", "virtiofs", "s", S], capture_output=True).returncode

    os.makedirs(S, exist_ok=True)
    seen("a new device", tried, 0)
    record()


def stopped():
    with Busy(record, "record") as busy:
        wait_rounds(busy, 10)
        # Nothing depends on how long it is.
        host("qmp guest stop; sleep 1; qmp guest cont")
        wait_rounds(busy, 10)


def more_memory():
    """While requests are on their way, QEMU tells the daemon of another piece of memory."""

    def pieces():
        return sum(name.startswith("memory") for name in os.listdir("/sys/devices/system/memory"))

    before = pieces()
    with Busy(record, "record") as busy:
        wait_rounds(busy, 10)
        host("add_memory")
        seen("more memory", lambda: pieces() > before, True)
        wait_rounds(busy, 10)


def unplugged():
    umount("s")
    host("unplug")
    assert subprocess.run(["mount", "-t", "virtiofs", "s", S], capture_output=True).returncode, "the device is still there"
    host("plug")
    mount_again()


def unplugged_while_it_is_used():
    held = use()
    pid = os.fork()
    if pid == 0:
        until_gone()
    host("unplug")
    equal(os.waitpid(pid, 0)[1], 0)
    refused(errno.ENOTCONN, os.fsync, held[1])
    for fd in held:
        try:
            os.close(fd)
        except OSError:
            pass
    umount("s")
    host("plug")
    mount_again()
    seen("all is closed", holds, 0)


def before_a_reset(act):
    """Whoever resets, the guest is in the middle of its work."""
    use()
    with Busy(record, "record") as busy:
        wait_rounds(busy, 10)
        print(f"ok boot {boot}", flush=True)
        act()
        time.sleep(SEEN)
        raise AssertionError("it goes on")


def crash():
    write("/proc/sysrq-trigger", b"c", flags=os.O_WRONLY)


def reset():
    host("qmp guest system_reset")


def kexec():
    """Another kernel starts. The share is not unmounted, and the device is what it was."""
    files = "/tmp/initramfs"
    os.makedirs(files)
    shutil.copytree("/run/boot", f"{files}/boot")
    shutil.copy(f"{S}/kexec/init", f"{files}/init")
    mine = subprocess.run(f"cd {files} && find . | busybox cpio -o -H newc", shell=True, check=True, capture_output=True).stdout
    write("/tmp/initrd", read(f"{S}/kexec/initramfs") + mine)
    line = read("/proc/cmdline").strip() + b"\0"
    kernel, initrd = (os.open(path, os.O_RDONLY) for path in (f"{S}/kexec/vmlinuz", "/tmp/initrd"))
    call("syscall", KEXEC_FILE_LOAD, kernel, initrd, len(line), line, 0)
    call("reboot", REBOOT_KEXEC)


if boot == 1:
    host(": >log; kexec_files kexec")
mount("s")
equal(holds(), 0)
the_log_is_whole()
match boot:
    case 1:
        for step in (stopped, more_memory, unplugged, unplugged_while_it_is_used):
            step()
            print(f"ok {step.__name__}", flush=True)
        before_a_reset(crash)
    case 2:
        before_a_reset(reset)
    case 3:
        before_a_reset(kexec)
umount("s")
print(f"ok boot {boot}, {os.uname().release}")
