#!/bin/bash
# Runs privileges.py on each share.
status=0
for share in /mnt/*; do
    /host/privileges.py "$share" || status=1
done
exit "$status"
