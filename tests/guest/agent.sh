# shellcheck shell=bash
# start_agent: starts the guest agent, if this guest has one, and waits until it repeats the changes of a share. It ends with the script.
start_agent() {
    [[ -x /host/thruway-guest ]] || return 0
    /host/thruway-guest 2>/tmp/agent.log &
    agent=$!
    # User-Mode Linux does not power off while a process waits in a request.
    trap 'kill $agent; wait $agent' EXIT
    until grep -q 'changes by others are repeated' /tmp/agent.log; do
        kill -0 $agent || { cat /tmp/agent.log && return 1; }
        sleep 0.1
    done
}
