#!/bin/bash
# bench.sh PLACE MIB MILLISECONDS JOB...: measures on the file that the host made in the share, or on one of MIB made here, on
# a tmpfs or on ext4 on a RAM disk. A JOB is a name, fio, first-touch, build or meta, and arguments.
place=$1 mib=$2 milliseconds=$3
shift 3
file=/mnt/b/data
if [[ $place != share ]]; then
    file=/tmp/native/data
    mkdir -p /tmp/native
    if [[ $place == tmpfs ]]; then
        mount -t tmpfs -o size=100% tmpfs /tmp/native
    else
        # Its size is the kernel's, by brd.rd_size.
        mkfs.ext4 -q /dev/ram0 && mount /dev/ram0 /tmp/native || exit 1
    fi
    head -c "${mib}M" /dev/zero | tr '\0' Z >$file || exit 1
fi
echo "version guest Linux $(uname -r)"
echo "version fio $(fio --version)"
for job; do
    read -r name tool arguments <<<"$job"
    command=(python3 /host/first-touch.py "$file")
    if [[ $tool == build ]]; then
        command=(python3 /host/build.py "$(dirname "$file")")
    elif [[ $tool == meta ]]; then
        command=(python3 /host/meta.py "$(dirname "$file")" "$milliseconds")
    elif [[ $tool == fio ]]; then
        command=(fio --name="$name" --filename="$file" --size="$(stat -c %s "$file")" --time_based --runtime="${milliseconds}ms"
            --output-format=json --output=/tmp/result)
    fi
    # The file is there, the guest's memory of it is not: no job profits from the one before. FUSE's inodes go with their names, with all
    # their pages; ext4's stay. Programs stay in memory: pages that had held them stall a job under TCG.
    sync
    dd of="$file" oflag=nocache conv=notrunc count=0 status=none
    echo 2 >/proc/sys/vm/drop_caches
    echo "begin $name"
    # shellcheck disable=SC2086  # the job's own words
    if ! "${command[@]}" $arguments >/tmp/log 2>&1; then
        echo "the job '$name' failed:"
        tail -n 20 /tmp/log
        exit 1
    fi
    [[ $tool == fio ]] || mv /tmp/log /tmp/result
    echo "result $name $(tr -d '\n' </tmp/result)"
done
