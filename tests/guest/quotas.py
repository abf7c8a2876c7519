#!/usr/bin/env python3
"""A directory of the share belongs to a project with a quota: quotas.py SHARE MIB PROJECT. The guest sees the quota as the directory's
size, as on the host, and the rest of the share is as large as its file system."""

import errno
import fcntl
import os
import struct
import sys
import time

sys.path.insert(0, "/host")
from check import equal, refused, write

FSGETXATTR = 0x801C581F
share, limit, project = sys.argv[1], int(sys.argv[2]) << 20, int(sys.argv[3])
limited = f"{share}/limited"


def size(path):
    st = os.statvfs(path)
    return st.f_blocks * st.f_frsize, st.f_bfree * st.f_frsize


def project_of(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return struct.unpack("4I12x", fcntl.ioctl(fd, FSGETXATTR, b"\0" * 28))[3]
    finally:
        os.close(fd)


whole, _ = size(share)
assert whole > 4 * limit, f"the share has {whole} bytes"
equal(size(limited)[0], limit)
equal((project_of(share), project_of(limited)), (0, project))
# What is made there belongs to the project, whoever asks.
write(f"{limited}/file", b"x" * (limit // 2))
equal(project_of(f"{limited}/file"), project)
total, free = size(limited)
equal(total, limit)
assert free <= limit // 2, f"{free} bytes are free"
refused(errno.EDQUOT, write, f"{limited}/more", b"x" * limit)
write(f"{share}/outside", b"x" * (2 * limit))
os.unlink(f"{limited}/more")
os.unlink(f"{limited}/file")
# The guest forgets a removed file when it likes, and the host frees it then. 60 s: a limit on hangs.
end = time.monotonic() + 60
while size(limited)[1] < limit // 2:
    assert time.monotonic() < end, f"{size(limited)[1]} bytes are free after the removal"
    time.sleep(0.1)
# A rename out of the project would take the file along without its quota: the host says EXDEV, and programs copy.
write(f"{limited}/file", b"x")
refused(errno.EXDEV, os.rename, f"{share}/outside", f"{limited}/outside")
print("ok quotas")
