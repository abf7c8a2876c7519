#!/bin/bash
# survive.sh: works on /mnt/s in several ways until /mnt/s/STOP is there. The host kills the daemon's worker meanwhile.
failed=0
mkdir -p /mnt/s/fio
for number in 1 2; do
    python3 /host/survive.py "/mnt/s/model$number" &
done
# With --cache=never a guest without DAX cannot map files for storing.
mapped=(--name=mapped --direct=0 --ioengine=mmap --rw=randwrite)
python3 -c 'import mmap; f = open("/mnt/s/map", "w+b"); f.truncate(1); mmap.mmap(f.fileno(), 1)' 2>/dev/null || mapped=()
(
    rounds=0
    until [[ -e /mnt/s/STOP ]]; do
        fio --directory=/mnt/s/fio --verify=crc32c --verify_fatal=1 --do_verify=1 --size=4M --bs=16k --end_fsync=1 --invalidate=1 \
            --name=buffered --rw=randwrite --name=direct --direct=1 --rw=write "${mapped[@]}" >/tmp/fio.log 2>&1 || {
            echo "FAILED fio"
            tail -n 30 /tmp/fio.log
            exit 1
        }
        rm -f /mnt/s/fio/*
        rounds=$((rounds + 1))
    done
    echo "ok: $rounds rounds of fio"
) &
# A process of the host cuts it off meanwhile, so any contents and errors are right.
[[ ! -e /mnt/s/cut ]] || until [[ -e /mnt/s/STOP ]]; do cksum /mnt/s/cut >/dev/null 2>&1 || true; done &
echo started
for job in $(jobs -p); do wait "$job" || failed=1; done
exit "$failed"
