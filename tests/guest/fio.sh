#!/bin/bash
# fio.sh MIB ENGINES SIZES: writes and verifies with every engine, block size and pattern, buffered and direct.
mib=$1 engines=$2 sizes=$3 jobs=0 failed=0

# all_jobs OPTION...: runs the jobs of $names in turn, each with a file of its own. One fio for all: in an emulated guest its start
# takes longer than a job.
all_jobs() {
    local name direct pattern arguments=()
    for name in $names; do
        read -r direct pattern <<<"${name/-/ }"
        # Only some engines use the depth.
        arguments+=(--name="$name" --stonewall --filename="/mnt/s/data-$name" --direct="${direct#direct=}" --rw="$pattern" --size="${mib}M"
            --bs="$size" --ioengine="$engine" --iodepth=8 --verify=crc32c --verify_fatal=1 "$@")
    done
    fio --exitall_on_error "${arguments[@]}" >>/tmp/log 2>&1 && ! grep -q 'err= *[1-9]' /tmp/log
}

for engine in $engines; do
    names='direct=0-write direct=0-randwrite'
    # mmap has no direct mode.
    [[ $engine == mmap ]] || names+=' direct=1-write direct=1-randwrite'
    for size in $sizes; do
        : >/tmp/log
        # do_verify reads back after the writes. The cache is dropped before the second run: a buffered job would otherwise verify
        # the guest's own memory.
        if all_jobs --do_verify=1 --invalidate=1 --fallocate=none --end_fsync=1 && echo 3 >/proc/sys/vm/drop_caches &&
            all_jobs --verify_only=1; then
            echo "ok $engine bs=$size: $(grep -E '^ *write:' /tmp/log | grep -oE 'BW=[^ ]+' | tr '\n' ' ')"
        else
            echo "FAILED $engine bs=$size"
            tail -n 60 /tmp/log
            failed=$((failed + $(wc -w <<<"$names")))
        fi
        jobs=$((jobs + $(wc -w <<<"$names")))
        rm -f /mnt/s/data-*
    done
done
echo "note: fio: $((jobs - failed)) of $jobs jobs verified"
exit $((failed > 0))
