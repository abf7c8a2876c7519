#!/usr/bin/python3
"""Reads a file of the host and keeps the memory until the host has measured it: dax-memory.py MODE."""

import os
import sys

sys.path.insert(0, "/host")
from window import *

mode = sys.argv[1]
mount("meet")
mount("s", mode)
print("mounted", flush=True)
while not os.path.exists(f"{MEET}/go"):
    time.sleep(0.1)
buffer = bytearray(1 << 20)
with open(f"{S}/file", "rb", buffering=0) as file:
    while file.readinto(buffer):
        pass
    print("read", flush=True)
    while not os.path.exists(f"{MEET}/end"):
        time.sleep(0.1)
umount("s")
umount("meet")
