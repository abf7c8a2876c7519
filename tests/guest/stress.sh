#!/bin/bash
# stress.sh SECONDS STRESSOR...: each stress-ng stressor on the share, two of its processes at once.
seconds=$1
shift
ran=0 failed=0 skipped=''
mkdir /mnt/s/stress
for stressor in "$@"; do
    stress-ng --"$stressor" 2 --timeout "$seconds" --verify --temp-path /mnt/s/stress --stderr >/tmp/log 2>&1
    status=$?
    case $status in
        0) echo "ok $stressor" && ran=$((ran + 1)) ;;
        # 3: no resources; 4: not implemented, here or in this kernel.
        3 | 4) skipped+=" $stressor" ;;
        *) echo "FAILED $stressor: status $status" && tail -n 30 /tmp/log && failed=$((failed + 1)) ;;
    esac
    # What a stressor that was ended in the middle leaves is no error, but must be removable.
    rm -rf /mnt/s/stress/* || { echo "FAILED to clean up after $stressor" && failed=$((failed + 1)); }
done
echo "note: stress-ng: $ran stressors ran, $failed failed; not to be had here:${skipped:- none}"
exit $((failed > 0 || ran == 0))
