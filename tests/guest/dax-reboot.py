#!/usr/bin/python3
"""Maps a file, unmounts and is reset, twice; then maps it again: dax-reboot.py, at each boot.

It unmounts because QEMU 11.1.3 crashes if a device with mappings is reset: when the device starts again, QEMU looks for the
memory of mappings that no longer exist (send_remove_regions, SIGSEGV). It also crashes if a mapping is removed while the device
is stopped. All mappings are gone when the guest has the answer to the unmount.
"""

import os
import sys

sys.path.insert(0, "/host")
from window import *

RANGES = 16

mount("meet")
boots = len(os.listdir(MEET)) + 1
write(f"{MEET}/boot-{boots}", b"")
mount("s", "always")
with mapped(f"{S}/file", RANGES * RANGE, writable=True) as view:
    for number in range(RANGES):
        at = number * RANGE
        due = b"" if boots == 1 else b"boot %d" % (boots - 1)
        got = view[at : at + 8].rstrip(b"\0")
        if got != due:
            print(f"FAILED boot {boots}, range {number}: {got}, expected {due}", flush=True)
            sys.exit(1)
        view[at : at + 6] = b"boot %d" % boots
umount("s")
print(f"mapped in boot {boots}", flush=True)
if boots < 3:
    write("/proc/sysrq-trigger", b"b", flags=os.O_WRONLY)
    time.sleep(60)
umount("meet")
