"""Prints the seconds that work on many small files takes: names.py DIR WHAT COUNT. Descriptor 3 is told when it begins."""

import io
import os
import subprocess
import sys
import tarfile
import time

directory, what, count = os.path.join(sys.argv[1], "names"), sys.argv[2], int(sys.argv[3])

# Longer than the timeouts of --cache=auto, which are 1 s.
PAUSE = 5
# Files of one directory, as in a large source tree.
WIDTH = 50
# GIT_OPTIONAL_LOCKS=0: see docs/benchmarks.md. The objects are not in the share: making 20,000 of them takes a minute, and status
# reads few. Nobody's settings count.
GIT = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_OBJECT_DIRECTORY": "/tmp/objects", "HOME": "/tmp", "GIT_CONFIG_NOSYSTEM": "1"}


def timed(action):
    os.write(3, f"begin {what}\n".encode())
    before = time.perf_counter()
    action()
    print(time.perf_counter() - before)


def tree(size):
    for n in range(count):
        place = f"{directory}/{n // WIDTH}"
        if n % WIDTH == 0:
            os.makedirs(place)
        with open(f"{place}/{n}", "wb") as file:
            file.write(b"%d" % n * (size // len(str(n))))


def git(*arguments):
    return subprocess.run(["git", "-C", directory, *arguments], env=GIT, check=True, capture_output=True).stdout


def status():
    tree(200)
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a")
    # Git reads files again that are as new as its index.
    time.sleep(1.1)
    git("update-index", "-q", "--refresh")
    git("status", "--short")
    time.sleep(PAUSE)
    timed(lambda: git("status", "--short"))


def again():
    def pass_over():
        for n in range(count):
            path = f"{directory}/{n // WIDTH}/{n}"
            os.stat(path)
            with open(path, "rb", buffering=0) as file:
                file.read()

    tree(4096)
    pass_over()
    # What the guest has created itself, it looks at once more.
    pass_over()
    time.sleep(PAUSE)
    timed(pass_over)


def untar():
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for n in range(count):
            info = tarfile.TarInfo(f"{n // WIDTH}/{n}")
            info.size = 1000
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    os.mkdir(directory)
    timed(lambda: subprocess.run(["tar", "x", "-C", directory], input=archive.getvalue(), check=True))


def remove():
    tree(1000)
    timed(lambda: subprocess.run(["rm", "-rf", directory], check=True))


# What the job before has left. It is not removed: ext4 is slow to create files where others were removed in the last minutes.
if os.path.exists(directory):
    os.rename(directory, f"{directory}-before-{what}")
{"status": status, "again": again, "untar": untar, "remove": remove}[what]()
