#!/usr/bin/python3
"""Maps a file, unmounts and is reset, twice; and maps it again: dax-reboot.py, at each boot.

It unmounts, as QEMU 11.1.3 does not outlive the reset of a device with mappings: at the next start of the device it looks for
the memory of mappings that are gone (send_remove_regions) and ends by SIGSEGV. So it does if it is asked to unmap while the
device is stopped: all is unmapped when the guest has its answer to the unmounting.
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
            print(f"FAILED boot {boots}, range {number}: {got} where {due} is due", flush=True)
            sys.exit(1)
        view[at : at + 6] = b"boot %d" % boots
umount("s")
print(f"mapped in boot {boots}", flush=True)
if boots < 3:
    write("/proc/sysrq-trigger", b"b", flags=os.O_WRONLY)
    time.sleep(60)
umount("meet")
