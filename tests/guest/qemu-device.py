#!/usr/bin/python3
"""Sees an interrupt for each queue, and that the device goes away while a file is mapped: qemu-device.py."""

import glob
import os
import sys

sys.path.insert(0, "/host")
from window import *

mount("s", "always")
(device,) = glob.glob("/sys/bus/virtio/drivers/virtiofs/virtio*")
name = os.path.basename(device)
lines = [line for line in read("/proc/interrupts").decode().splitlines() if f" {name}-" in line]
print("\n".join(lines), flush=True)
# The configuration, the high priority queue, two request queues.
equal(len(lines), 4)
# Linux 7.2 does not survive that a device goes away while a process maps its memory. Without a process, QEMU's mappings stay.
with mapped(f"{S}/file", 16 * RANGE, writable=True) as view:
    for number in range(16):
        view[number * RANGE] = 1
print("mapped", flush=True)
seen("the device goes away", lambda: os.path.exists(device), False)
