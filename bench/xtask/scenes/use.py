#!/usr/bin/python3
"""use.py NAME: what a guest does with its share, without end."""

import glob
import mmap
import os
import random
import subprocess
import sys
import time


def web():
    """A server that answers now and then."""
    while True:
        for path in random.sample(glob.glob("page-*"), 20):
            file = os.open(path, os.O_RDONLY)
            os.read(file, 1 << 20)
            os.close(file)
        time.sleep(0.2 + random.random())


def build():
    """Small files come and go."""
    while True:
        subprocess.run("cp -r src out; grep -r 1999 out >out/found; rm -r out", shell=True)
        time.sleep(random.random())


def media():
    """Long files are read from the beginning to the end."""
    while True:
        for path in glob.glob("film-*"):
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    time.sleep(0.01)


def models():
    """Files are mapped, and read here and there."""
    files = [mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ) for path in glob.glob("model-*")]
    while True:
        for _ in range(200):
            file = random.choice(files)
            file[random.randrange(len(file))]
        time.sleep(0.5)


os.chdir(f"/mnt/{sys.argv[1]}")
print("at work", flush=True)
globals()[sys.argv[1]]()
