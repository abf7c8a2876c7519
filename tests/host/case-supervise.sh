# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Workers that are killed under a guest, and daemons that upgrade (--supervise).

# worker PID: prints the worker of this supervised daemon, if there is one: its only grandchild.
worker() {
    local children child
    read -ra children < <(cat "/proc/$1"/task/*/children | tr '\n' ' ') || true
    for child in "${children[@]}"; do cat "/proc/$child"/task/*/children; done 2>/dev/null | tr -d ' '
}

# start_work KIND: a guest works until work_ends. Sets $pid. survive_boot has more arguments of boot.
survive_boot=()
start_work() {
    "$boot" --kind "$1" "${survive_boot[@]}" --log-dir "$work/survive.logs" --fs "s=$work/sockets/s" --ro-dir "$guest_dir" \
        "$guest_dir/survive.sh" >"$work/out" 2>&1 &
    pid=$!
    # 300 s: the boot, under emulation on a busy machine.
    wait_line "$work/out" '^(started|FAILED)' 300 "$pid"
}

# work_ends WHAT: fails if the guest has noticed that.
work_ends() {
    touch "$work/share/STOP"
    wait "$pid" || { cat "$work/out" && fail "the guest noticed $1"; }
    cat "$work/out"
    grep -q '^ok: [0-9]* rounds' "$work/out" || fail 'fio did not end'
    (($(grep -c '^ok: [0-9]* steps' "$work/out") == 2)) || fail 'the model did not end'
}

# guest_gets_on: waits until the guest, if it still runs, has changed the share.
guest_gets_on() {
    # 300 s, as for the boot.
    local deadline=$((SECONDS + 300))
    touch "$work/since"
    until [[ $(find "$work/share" -newer "$work/since" ! -name cut -print -quit 2>/dev/null) ]]; do
        kill -0 "$pid" 2>/dev/null || return 0
        ((SECONDS < deadline)) || fail 'the guest does not get on'
        sleep 0.01
    done
}

# survives KIND KILLS DAEMON-ARGUMENT...: kills so many workers at random moments of a guest's work, in three ways.
survives() {
    local kind=$1 kills=$2 pid killed found
    shift 2
    [[ -d $work/share ]] || make_fast_share share
    start_daemon s "$work/share" --supervise --xattr --posix-lock --flock "$@"
    start_work "$kind"
    for ((killed = 0; killed < kills; killed++)); do
        # Five in a row that have answered nothing end the daemon.
        ((killed % 3)) || guest_gets_on
        sleep "0.$((RANDOM % 9))$((RANDOM % 10))"
        found=$(worker "$daemon_pid")
        kill -0 "$pid" 2>/dev/null || break
        # The guest reads this one all the time.
        [[ ! -e $work/share/cut ]] || { truncate -s "$((RANDOM * 200))" "$work/share/cut" && truncate -s 6M "$work/share/cut"; } &
        case $((RANDOM % 4)) in
            0) kill -SEGV "${found:-none}" ;;
            1) kill -STOP "${found:-none}" && sleep 0.1 && kill -KILL "$found" ;;
            *) kill -KILL "${found:-none}" ;;
        esac 2>/dev/null || true
    done
    work_ends "one of $killed kills"
    found=$(grep -c 'another one goes on' "$work/daemons.logs/daemon-s.log")
    note "$killed kills, $found workers went on: $(grep '^ok' "$work/out" | tr '\n' ';')"
    ((found >= killed / 2)) || fail "only $found workers were killed"
    logs_are_clean "$work/daemons.logs" 'another one goes on'
    logs_are_clean "$work/survive.logs"
}

case_survive_auto() { survives uml "$(pick 60 400)"; }
case_survive_always() { survives uml "$(pick 60 400)" --cache=always; }
case_survive_never() { survives uml "$(pick 30 400)" --cache=never --inode-file-handles=never; }
case_survive_writeback() { survives uml "$(pick 30 400)" --writeback; }
case_survive_qemu() { survives qemu "$(pick 30 400)" --cache=auto; }

# The guest has files mapped, also one that a process of the host cuts off. On the disk, where a truncation waits until the guest
# does not have the file's pages any more. 128 MiB: it takes mappings away all the time.
case_survive_dax() {
    make_share share
    truncate -s 6M "$work/share/cut"
    survive_boot=(--dax --mount-opts dax=always)
    survives qemu "$(pick 40 600)" --dax-window=128M,required
}

# Upgrades go back and forth between two copies of the daemon, and workers are killed between them.
case_upgrade() {
    local pid upgrades found
    make_fast_share share
    cp "${THRUWAY_DAEMON%% *}" "$work/thruwayd"
    cp "${THRUWAY_DAEMON%% *}" "$work/other"
    daemon_command=$work/thruwayd start_daemon s "$work/share" --supervise --xattr --posix-lock --flock
    start_work uml
    for ((upgrades = 1; upgrades <= $(pick 20 100); upgrades++)); do
        sleep "0.$((RANDOM % 9))$((RANDOM % 10))"
        mv "$work/thruwayd" "$work/third" && mv "$work/other" "$work/thruwayd" && mv "$work/third" "$work/other"
        kill -USR2 "$daemon_pid"
        # 60 s: it takes milliseconds. The process that was started becomes the program a bit later than the log says so.
        for ((found = 0; found < 6000; found++)); do
            [[ $(grep -c 'upgraded from version' "$work/daemons.logs/daemon-s.log") -lt $upgrades ||
                ! $work/thruwayd -ef /proc/$daemon_pid/exe ]] || break
            sleep 0.01
        done
        ((found < 6000)) || fail "upgrade $upgrades does not come to an end, or another program runs"
        if ((RANDOM % 4 == 0)); then kill -KILL "$(worker "$daemon_pid")"; fi
    done
    work_ends 'an upgrade'
    note "$((upgrades - 1)) upgrades: $(grep '^ok' "$work/out" | tr '\n' ';')"
    note "ms: $(sed -n 's/.*requests waited for \(.*\) ms/\1/p' "$work/daemons.logs/daemon-s.log" | sort -n | tr '\n' ' ')"
    logs_are_clean "$work/daemons.logs" 'another one goes on'
    logs_are_clean "$work/survive.logs"
}

# pjdfstest tries some 400 results of calls, of which most must not happen twice.
case_survive_pjdfstest() {
    local pid killed=0
    make_share survive
    start_daemon s "$work/survive" --supervise --posix-acl
    "$boot" --kind uml --tools --log-dir "$work/survive.logs" --fs "s=$work/sockets/s" "$guest_dir/pjdfstest.sh" >"$work/raw" 2>&1 &
    pid=$!
    # 300 s: the boot, under emulation on a busy machine.
    wait_line "$work/raw" '::' 300 "$pid"
    while kill -0 "$pid" 2>/dev/null; do
        sleep "0.$((RANDOM % 4))$((RANDOM % 10))"
        if kill -KILL "$(worker "$daemon_pid")" 2>/dev/null; then killed=$((killed + 1)); fi
    done
    wait "$pid" || (($? == 1)) || fail 'the guest did not come to its end'
    sed 's/\x1b\[[0-9;]*m//g' "$work/raw" >"$work/survive.out"
    pjdfstest_results survive
    note "$killed kills"
    ((killed > 0)) || fail 'nothing was killed'
    sed -i '/another one goes on/d' "$work/daemons.logs"/daemon-*.log
    pjdfstest_check survive
    logs_are_clean "$work/daemons.logs"
}

# What the host changes is seen, though the guest has leases of what it knew before: the agent registers again, and the guest looks at all again.
case_survive_agent() {
    local pid number found
    with_agent
    make_fast_share share
    mkdir "$work/share/d"
    echo 0 >"$work/share/d/number"
    start_daemon s "$work/share" --supervise
    "$boot" --kind uml --log-dir "$work/survive.logs" --fs "s=$work/sockets/s" --ro-dir "$guest_dir" \
        "$guest_dir/survive-agent.py" >"$work/out" 2>&1 &
    pid=$!
    # 300 s: the boot, under emulation on a busy machine.
    wait_line "$work/out" '^saw 0$' 300 "$pid"
    for number in {1..10} end; do
        found=$(worker "$daemon_pid")
        kill -KILL "$found"
        echo "$number" >"$work/share/d/new" && mv "$work/share/d/new" "$work/share/d/number"
        # 40 s: shorter than leases are, and it takes milliseconds.
        wait_line "$work/out" "^saw $number\$" 40 "$pid"
    done
    wait "$pid" || { cat "$work/out" && fail 'the guest failed'; }
    logs_are_clean "$work/daemons.logs" 'another one goes on'
    logs_are_clean "$work/survive.logs"
}
