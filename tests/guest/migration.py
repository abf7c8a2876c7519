#!/usr/bin/python3
"""Works on open files while the machine moves, until DIRECTORY/stop exists: migration.py DIRECTORY KIND.

KIND is "named", "removed" (a removed file is open too), "lost" (the move loses that file) or "waiting": a process waits for a lock
that the host holds from the creation of DIRECTORY/locked to that of DIRECTORY/stop. With the guest agent, only the agent can make
DIRECTORY/stop be seen, and an event comes with it.
"""

import errno
import fcntl
import os
import sys
import time

sys.path.insert(0, "/host")
import oracle
import window

share, kind = sys.argv[1:]
agent = window.start_agent((share,))
os.chdir(share)
os.makedirs("deep/er", exist_ok=True)
os.makedirs("many", exist_ok=True)
NAMES = {f"entry {n}" for n in range(500)}
for name in NAMES:
    open(f"many/{name}", "w").close()
with open("deep/er/read", "w") as file:
    file.write("from before")

log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
read = os.open("deep/er/read", os.O_RDONLY)
moved = os.open("moving", os.O_RDWR | os.O_CREAT)
os.rename("moving", "deep/moved")
listing = os.scandir("many")
seen = {next(listing).name for _ in range(10)}
os.symlink("er/read", "deep/link")
identities = {name: os.stat(name).st_ino for name in ["deep", "deep/er/read", "deep/moved", "many/entry 1"]}
if kind in ["removed", "lost"]:
    removed = os.open("removed", os.O_RDWR | os.O_CREAT)
    os.write(removed, b"kept")
    os.unlink("removed")

if kind == "waiting":
    lock = os.open("lock", os.O_RDWR | os.O_CREAT)
    while not os.path.exists("locked"):
        time.sleep(0.1)
    waiter = os.fork()
    if not waiter:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os._exit(0 if os.path.exists("stop") else 1)

if agent:
    events = oracle.Watcher(["."], oracle.CREATE)
    assert not os.path.exists("stop")

line = 0
while not os.path.exists("stop"):
    line += 1
    os.write(log, b"line %06d\n" % line)
    os.pwrite(moved, b"line %06d\n" % line, 0)
    if line % 20 == 0:
        os.fsync(log)
        print("written", line, flush=True)
    # Slow enough that migration of the dirty pages converges, fast enough that every moment of it sees a write.
    time.sleep(0.005)

if agent:
    # Its name is what ends the wait.
    oracle.SENTINEL = "stop"
    events.until("stop")
seen |= {entry.name for entry in listing}
assert seen == NAMES, f"{len(seen)} of {len(NAMES)} entries"
for name, ino in identities.items():
    assert os.stat(name).st_ino == ino, name
assert os.pread(read, 100, 0) == b"from before"
assert os.pread(moved, 12, 0) == b"line %06d\n" % line and os.fstat(moved).st_ino == identities["deep/moved"]
assert open("deep/link").read() == "from before"
if kind == "removed":
    assert os.pread(removed, 10, 0) == b"kept" and os.pwrite(removed, b"more", 4) == 4
    assert os.fstat(removed).st_nlink == 0
if kind == "lost":
    for use in [lambda: os.pwrite(removed, b"more", 4), lambda: os.fstat(removed), lambda: os.close(removed)]:
        try:
            use()
            raise AssertionError("the lost file is there")
        except OSError as error:
            assert error.errno == errno.EIO, error
if kind == "waiting":
    assert os.waitpid(waiter, 0)[1] == 0, "the lock came too early"
for fd in [log, read, moved]:
    os.close(fd)
with open("last", "w") as file:
    file.write(f"{line}\n")
