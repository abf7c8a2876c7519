#!/bin/bash
# stress.sh SECONDS STRESSOR...: runs each stress-ng stressor on the share, with two processes.
seconds=$1
shift
ran=0 failed=0 skipped=''
mkdir /mnt/s/stress
for stressor in "$@"; do
    stress-ng --"$stressor" 2 --timeout "$seconds" --verify --temp-path /mnt/s/stress --stderr >/tmp/log 2>&1
    status=$?
    case $status in
        0) echo "ok $stressor" && ran=$((ran + 1)) ;;
        # 3: no resources; 4: not implemented in this stress-ng or this kernel.
        3 | 4) skipped+=" $stressor" ;;
        *) echo "FAILED $stressor: status $status" && tail -n 30 /tmp/log && failed=$((failed + 1)) ;;
    esac
    # A stressor that is ended may leave files, but they must be removable.
    rm -rf /mnt/s/stress/* || { echo "FAILED to clean up after $stressor" && failed=$((failed + 1)); }
done
echo "note: stress-ng: $ran stressors ran, $failed failed; not available here:${skipped:- none}"
exit $((failed > 0 || ran == 0))
