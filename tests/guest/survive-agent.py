#!/usr/bin/env python3
"""With the guest agent: reads a file again and again, which the host changes while it kills the daemon's worker, and says what it sees."""
import os
import subprocess
import sys
import time

agent = subprocess.Popen(["/host/thruway-guest"])
os.chdir("/mnt/s")
last = ""
# It is a limit on hangs: the host waits for what is printed.
deadline = time.monotonic() + 1000
while last != "end":
    os.listdir("d")
    with open("d/number") as file:
        now = file.read().strip()
    if now != last:
        last = now
        print(f"saw {now}", flush=True)
    if agent.poll() is not None:
        print("FAILED: the agent has ended")
        sys.exit(1)
    assert time.monotonic() < deadline, "the host says nothing"
    time.sleep(0.01)
agent.terminate()
print("ok")
