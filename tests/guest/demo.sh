#!/bin/bash
# The guest's part of the demo. Each command is shown before its output.
set -ex
uname -srm
mount -t virtiofs
ls -lR /mnt/demo
cat /mnt/demo/from-the-host.txt
echo "written by the guest, Linux $(uname -r), at $(date +%T)" >/mnt/demo/from-the-guest.txt
cat /mnt/demo/from-the-guest.txt
tail -n 1 /mnt/demo/a-directory/numbers.txt
