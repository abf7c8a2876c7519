#!/usr/bin/python3
"""Stores to a file in the window: qemu-libvirt.py."""

import sys

sys.path.insert(0, "/host")
from window import *

path = "/mnt/share/file"
assert is_dax(path), "the share has no window"
with mapped(path, RANGE, writable=True) as view:
    view[:6] = b"window"
