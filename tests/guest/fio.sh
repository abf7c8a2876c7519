#!/bin/bash
# fio.sh MIB ENGINES SIZES: writes and verifies with every engine, block size and pattern, buffered and direct.
mib=$1 engines=$2 sizes=$3 jobs=0 failed=0
for engine in $engines; do
    for direct in 0 1; do
        # mmap has no direct mode.
        [[ $engine$direct != mmap1 ]] || continue
        for size in $sizes; do
            for pattern in write randwrite; do
                name="$engine direct=$direct bs=$size $pattern"
                jobs=$((jobs + 1))
                # Only some engines use the depth. do_verify reads back after the writes. The cache is dropped first: a buffered
                # job would otherwise verify the guest's own memory.
                if fio --name=verify --filename=/mnt/s/data --size="${mib}M" --bs="$size" --rw="$pattern" --ioengine="$engine" \
                    --direct="$direct" --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1 --invalidate=1 \
                    --fallocate=none --end_fsync=1 --exitall_on_error >/tmp/log 2>&1 && ! grep -q 'err= *[1-9]' /tmp/log &&
                    echo 3 >/proc/sys/vm/drop_caches &&
                    fio --name=verify --filename=/mnt/s/data --size="${mib}M" --bs="$size" --rw="$pattern" --ioengine="$engine" \
                        --direct="$direct" --iodepth=8 --verify=crc32c --verify_only=1 --verify_fatal=1 >>/tmp/log 2>&1; then
                    echo "ok $name: $(grep -m 1 -oE 'BW=[^ ]+' /tmp/log)"
                else
                    echo "FAILED $name"
                    tail -n 30 /tmp/log
                    failed=$((failed + 1))
                fi
                rm -f /mnt/s/data
            done
        done
    done
done
echo "note: fio: $((jobs - failed)) of $jobs jobs verified"
exit $((failed > 0))
