#!/bin/bash
# The whole pjdfstest suite on /mnt/s; the host reads the results from what this prints.
mkdir -p /tmp/second
cd /mnt/s && pjdfstest -c /etc/pjdfstest.toml -s /tmp/second -p /mnt/s
