#!/bin/bash
# Makes files in the share /mnt/s, each in a directory of its own. When the host has made /mnt/meet/go, it removes them all, while it
# knows some of them still.
set -e
for ((n = 0; n < 100; n++)); do
    mkdir "/mnt/s/$n"
    echo "$n" >"/mnt/s/$n/kept"
    [[ $(<"/mnt/s/$n/kept") == "$n" ]]
done
ls -lR /mnt/s >/dev/null
touch /mnt/meet/made
until [[ -e /mnt/meet/go ]]; do sleep 0.1; done
# An open by O_PATH sends no message, so it keeps the guest from forgetting the file, and the host does not know of it.
python3 - <<'END'
import os

for n in range(100):
    file = f"/mnt/s/{n}/kept"
    if n % 2:
        os.open(file, os.O_PATH)
    os.unlink(file)
    os.rmdir(f"/mnt/s/{n}")
END
