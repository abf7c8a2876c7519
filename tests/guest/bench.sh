#!/bin/bash
# bench.sh PLACE MIB MILLISECONDS JOB...: measures on the host's file in the share, or on a new file of MIB on a tmpfs or on
# ext4 on a RAM disk. A JOB is a name, one of fio, first-touch, build, meta, names and seen, and
# arguments. A program may print to descriptor 3 that its job begins only then.
# shellcheck source=tests/guest/agent.sh
. /host/agent.sh
place=$1 mib=$2 milliseconds=$3
shift 3
file=/mnt/b/data
if [[ $place != share ]]; then
    file=/tmp/native/data
    mkdir -p /tmp/native
    if [[ $place == tmpfs ]]; then
        mount -t tmpfs -o size=100% tmpfs /tmp/native
    else
        # The kernel's brd.rd_size sets its size.
        mkfs.ext4 -q /dev/ram0 && mount /dev/ram0 /tmp/native || exit 1
    fi
    head -c "${mib}M" /dev/zero | tr '\0' Z >$file || exit 1
fi
start_agent || exit 1
echo "version guest Linux $(uname -r)"
echo "version fio $(fio --version)"
for job; do
    read -r name tool arguments <<<"$job"
    command=(python3 /host/first-touch.py "$file")
    if [[ $tool == build ]]; then
        command=(python3 /host/build.py "$(dirname "$file")")
    elif [[ $tool == meta ]]; then
        command=(python3 /host/meta.py "$(dirname "$file")" "$milliseconds")
    elif [[ $tool == names || $tool == seen ]]; then
        command=(python3 "/host/$tool.py" "$(dirname "$file")")
        [[ $tool == names ]] || command+=("$milliseconds")
    elif [[ $tool == fio ]]; then
        command=(fio --name="$name" --filename="$file" --size="$(stat -c %s "$file")" --time_based --runtime="${milliseconds}ms"
            --output-format=json --output=/tmp/result)
    fi
    # Drop what the previous job cached. FUSE drops inodes and their pages together with their names; ext4 keeps them. Programs stay
    # cached: their pages, if reused, stall a job under TCG.
    sync
    dd of="$file" oflag=nocache conv=notrunc count=0 status=none
    echo 2 >/proc/sys/vm/drop_caches
    echo "begin $name"
    # shellcheck disable=SC2086  # the job's own words
    if ! "${command[@]}" $arguments 3>&1 >/tmp/log 2>&1; then
        echo "the job '$name' failed:"
        tail -n 20 /tmp/log
        exit 1
    fi
    [[ $tool == fio ]] || mv /tmp/log /tmp/result
    echo "result $name $(tr -d '\n' </tmp/result)"
done
