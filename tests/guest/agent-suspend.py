#!/usr/bin/env python3
"""A guest whose agent waits can be suspended: its kernel freezes all processes, as before a suspend, and goes on. Linux suspends no guest
that has a virtio-fs device (virtio_fs_freeze(), fs/fuse/virtio_fs.c), so this is as far as it can go."""

import sys

sys.path.insert(0, "/host")
from window import *


def waits():
    """The agent is in a request that the daemon answers when something changes."""
    children = [f"/proc/{agent.pid}/task/{task}/wchan" for task in os.listdir(f"/proc/{agent.pid}/task")]
    return any(b"request_wait_answer" in read(path) for path in children)


def freeze():
    # The kernel gives up after 20 s, with EBUSY.
    write("/sys/power/state", b"freeze", flags=os.O_WRONLY)


mount("s")
mount("meet")
agent = start_agent()
assert agent, "there is no agent"
os.chdir(S)
write("/sys/power/pm_test", b"freezer", flags=os.O_WRONLY)
# By default the kernel waits for 5 s before it goes on.
write("/sys/module/suspend/parameters/pm_test_delay", b"0", flags=os.O_WRONLY)
assert not os.path.exists("made")
for turn in range(3):
    seen("the agent waits", waits, True)
    freeze()
    host(f"touch made{turn}")
    seen("a name of the host's", lambda: os.path.exists(f"made{turn}"), True)
assert agent.poll() is None, read("/tmp/agent.log").decode()
os.chdir("/")
agent.terminate()
equal(agent.wait(), 0)
umount("s")
print("ok")
