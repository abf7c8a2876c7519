#!/bin/bash
# bench.sh SECONDS JOB...: measures on the file that the host made. A JOB is a name, fio or first-touch, and arguments.
file=/mnt/b/data
seconds=$1
shift
echo "version guest Linux $(uname -r)"
echo "version fio $(fio --version)"
for job; do
    read -r name tool arguments <<<"$job"
    command=(python3 /host/first-touch.py "$file")
    if [[ $tool == fio ]]; then
        command=(fio --name="$name" --filename="$file" --size="$(stat -c %s "$file")" --time_based --runtime="$seconds"
            --output-format=json --output=/tmp/result)
    fi
    # The file is there, the guest's memory of it is not: no job profits from the one before.
    sync
    echo 3 >/proc/sys/vm/drop_caches
    # shellcheck disable=SC2086  # the job's own words
    if ! "${command[@]}" $arguments >/tmp/log 2>&1; then
        echo "the job '$name' failed:"
        tail -n 20 /tmp/log
        exit 1
    fi
    [[ $tool == fio ]] || mv /tmp/log /tmp/result
    echo "result $name $(tr -d '\n' </tmp/result)"
done
