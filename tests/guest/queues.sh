#!/bin/bash
# Loads each CPU with requests, then waits until the host has looked at the daemon.
[[ $(nproc) == 2 ]] || { echo "FAILED: $(nproc) CPUs" && exit 1; }
for cpu in 0 1; do
    mkdir "/mnt/s/$cpu"
    # shellcheck disable=SC2016  # the inner shell's
    taskset -c "$cpu" bash -c 'for ((i = 0; i < 1000; i++)); do : >"$1/$i"; done; rm -r "$1"' load "/mnt/s/$cpu" &
done
wait
dmesg | grep -i 'virtio.*queue'
echo loaded
until [[ -e /mnt/s/go ]]; do sleep 0.2; done
