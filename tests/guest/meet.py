"""Two guests, a and b, meet in the share /mnt/meet."""

import os
import time

# 120 s: the other guest may still be booting, under emulation on a busy machine.
PATIENCE = 120
turns = 0


def meet(role):
    """Returns when both guests have come here."""
    global turns
    turns += 1
    other = {"a": "b", "b": "a"}[role]
    open(f"/mnt/meet/{turns}{role}", "w").close()
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(f"/mnt/meet/{turns}{other}"):
        assert time.monotonic() < deadline, f"the other guest did not come to turn {turns}"
        time.sleep(0.01)
