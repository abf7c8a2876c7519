#!/bin/bash
# listing.sh ROUNDS: lists the directory of each share in turn, with all attributes and a cold cache.
for ((round = 1; round <= $1; round++)); do
    for share in ours theirs; do
        echo 2 >/proc/sys/vm/drop_caches
        read -r count took < <(/host/list-tree.py "/mnt/$share")
        echo "round $round, $share: $took s"
        echo "$took" >>"/tmp/$share"
        ((count == 100000)) || { echo "FAILED: $count entries" && exit 1; }
    done
done
median() { sort -n "$1" | sed -n "$((($(wc -l <"$1") + 1) / 2))p"; }
echo "note: 100,000 entries listed with stat, median of $1: $(median /tmp/ours) s, virtiofsd $(median /tmp/theirs) s"
