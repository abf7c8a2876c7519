#!/usr/bin/env python3
"""The packaged guest agent finds a share and is ended."""

import sys

sys.path.insert(0, "/host")
from window import *

mount("s")
agent = start_agent()
assert agent, "there is no agent"
agent.terminate()
equal(agent.wait(), 0)
umount("s")
print("ok")
