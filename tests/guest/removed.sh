#!/bin/bash
# Makes files in the share /mnt/s, each in a directory of its own. When the host has made /mnt/meet/go, it removes them all.
set -e
for ((n = 0; n < 100; n++)); do
    mkdir "/mnt/s/$n"
    echo "$n" >"/mnt/s/$n/kept"
    [[ $(<"/mnt/s/$n/kept") == "$n" ]]
done
ls -lR /mnt/s >/dev/null
touch /mnt/meet/made
until [[ -e /mnt/meet/go ]]; do sleep 0.1; done
for ((n = 0; n < 100; n++)); do rm "/mnt/s/$n/kept" && rmdir "/mnt/s/$n"; done
