#!/bin/bash
# fsx.sh OPERATIONS SEED...: fsx on each share, set up for what its cache mode can do.
operations=$1
shift
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
# Without a page cache there are no shared mappings, nor what they are compared with.
sed -E 's/^(mapread|mapwrite|invalidate) .*/\1 = 0/' /tmp/mmap.toml >/tmp/plain.toml
failed=0
for share in /mnt/*; do
    case ${share##*/} in
        never | metadata) config=/tmp/plain.toml ;;
        *) config=/tmp/mmap.toml ;;
    esac
    for seed in "$@"; do
        start=$SECONDS
        if fsx -f "$config" -N "$operations" -S "$seed" -P /tmp "$share/fsx-$seed" >/tmp/log 2>&1; then
            echo "ok fsx ${share##*/}, seed $seed ($((SECONDS - start)) s)"
        else
            echo "FAILED fsx ${share##*/}, seed $seed"
            tail -n 30 /tmp/log
            failed=1
        fi
        rm -f "$share/fsx-$seed"
    done
done
exit $failed
