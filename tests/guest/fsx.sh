#!/bin/bash
# fsx.sh OPERATIONS SEED...: runs fsx on each share with the operations that its cache mode allows.
operations=$1
shift
# Operations per run. fsx 0.3.2 never unmaps what it maps to read, and each fsync gets slower: many short runs with their own seeds.
most=10000
cat >/tmp/mmap.toml <<'END'
flen = 1048576
[opsize]
max = 131072
[weights]
close_open = 1
invalidate = 1
mapread = 5
mapwrite = 5
read = 10
write = 10
truncate = 3
fsync = 1
fdatasync = 1
posix_fallocate = 1
punch_hole = 1
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
END
# Without a page cache there are no shared mappings.
sed -E 's/^(mapread|mapwrite|invalidate) .*/\1 = 0/' /tmp/mmap.toml >/tmp/plain.toml
sed 's/^posix_fallocate .*/posix_fallocate = 0/' /tmp/mmap.toml >/tmp/far.toml
failed=0
for share in /mnt/*; do
    case ${share##*/} in
        never | metadata) config=/tmp/plain.toml ;;
        far) config=/tmp/far.toml ;;
        *) config=/tmp/mmap.toml ;;
    esac
    for seed in "$@"; do
        start=$SECONDS outcome=ok
        for ((done = 0; done < operations; done += part)); do
            part=$((operations - done < most ? operations - done : most))
            if ! fsx -f "$config" -N "$part" -S "$((seed + done))" -P /tmp "$share/fsx-$seed" >/tmp/log 2>&1; then
                echo "with -S $((seed + done)):"
                # The error comes before the last operations.
                grep -vE '^\S+ fsx\] +[0-9]+ ' /tmp/log || true
                tail -n 30 /tmp/log
                outcome=FAILED failed=1
            fi
            rm -f "$share/fsx-$seed"
        done
        echo "$outcome fsx ${share##*/}, $operations operations, seed $seed ($((SECONDS - start)) s)"
    done
done
exit $failed
