#!/usr/bin/python3
"""Lists a tree with the attributes of every entry and prints the number of entries and the seconds: list-tree.py DIRECTORY."""

import os
import sys
import time


def count(directory):
    number = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)
            number += 1
            if entry.is_dir(follow_symlinks=False):
                number += count(entry.path)
    return number


start = time.monotonic()
print(count(sys.argv[1]), f"{time.monotonic() - start:.2f}", flush=True)
