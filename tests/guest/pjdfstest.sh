#!/bin/bash
# Runs the whole pjdfstest suite on /mnt/s. The host reads the results from the output.
cat >/tmp/pjdfstest.toml <<'END'
# The optional features that virtio-fs has, and Debian's names.
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}

[settings]
# Time stamps tick every 10 ms in a UML guest (HZ=100). This is twice that.
naptime = 0.02
allow_remount = false

[dummy_auth]
entries = [["nobody", "nogroup"], ["tests", "tests"]]
END
mkdir -p /tmp/second
cd /mnt/s && pjdfstest -c /tmp/pjdfstest.toml -s /tmp/second -p /mnt/s
