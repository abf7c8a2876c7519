#!/usr/bin/env python3
"""The guest agent on a stock kernel: agent.py ROUNDS SEED. Programs of the guest see by inotify(7) what a local watcher on the host sees, and
nothing that the guest has cached is out of date."""

import json
import os
import random
import select
import sys
import time

sys.path.insert(0, "/host")
import oracle
from window import *

# A limit on hangs, in seconds.
LIMIT = 60
# So many changes in a row are each heard of, one for one. Among more, files are changed again before the guest hears of them, and some
# events may be missing: less than one of FEW.
ALONE, FEW = 3, 100
DIRECTORIES = ["d0", "d1", "d1/inner", "d2"]
rounds, seed = int(sys.argv[1]), int(sys.argv[2])


def wait(fd):
    ready, _, _ = select.select([fd], [], [], LIMIT)
    assert ready, "no event came"


def look_around(chooser):
    """Makes the guest know some of it."""
    for directory in DIRECTORIES:
        for name in os.listdir(directory):
            if chooser.random() < 0.5:
                try:
                    oracle.facts(f"{directory}/{name}")
                except OSError:
                    pass


def differences(first, second):
    return {key: (first.get(key), second.get(key)) for key in {*first, *second} if first.get(key) != second.get(key)}


def main():
    mount("s")
    mount("meet")
    agent = start_agent()
    os.chdir(S)
    host(f"mkdir -p {' '.join(DIRECTORIES)}")
    chooser = random.Random(seed)
    watcher = oracle.Watcher(DIRECTORIES)
    all_events = missed = 0
    for number in range(seed, seed + rounds):
        look_around(chooser)
        count = chooser.choice((1, 1, 2, 3, 10, 60))
        expected = json.loads(host(f"python3 $guest_dir/oracle.py {number} {count} {' '.join(DIRECTORIES)}"))
        events = watcher.until(f"{oracle.SENTINEL}{number}", wait)
        due = [tuple(event) for event in expected["events"]]
        got, wanted = oracle.streams(events), oracle.streams(due)
        if count <= ALONE:
            assert not (bad := differences(got[0], wanted[0])), f"round {number}: {expected['done']}: guest, host: {bad}"
            equal(got[1], wanted[1])
            equal(oracle.order(events), oracle.order(due))
        for name, stream in got[0].items():
            assert oracle.within(stream, wanted[0].get(name, [])), f"round {number}: {name}: {stream}, on the host {wanted[0].get(name)}"
        all_events += oracle.size(wanted[0])
        missed += oracle.size(wanted[0]) - oracle.size(got[0])
        found = json.loads(json.dumps(oracle.state(DIRECTORIES)))
        assert not (bad := differences(found, expected["state"])), f"round {number}: {expected['done']}: guest, host: {bad}"
    print(f"ok {rounds} rounds, {all_events} events, {missed} of them not heard", flush=True)
    assert missed * FEW <= all_events, "too many events are missing"
    agent.terminate()
    equal(agent.wait(), 0)


main()
