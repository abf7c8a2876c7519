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
# Shorter than leases are, and generous: it takes milliseconds.
SOON = 40
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


def state_is(due, what):
    """What nobody watches may be right a moment after the last event. Nothing that the guest keeps ends by itself as soon."""
    deadline = time.monotonic() + SOON
    while bad := differences(json.loads(json.dumps(oracle.state(DIRECTORIES))), due):
        assert time.monotonic() < deadline, f"{what}: guest, host: {bad}"
        time.sleep(0.01)


def compare(chooser, numbers, watched):
    """Random changes on the host, while these directories are watched. Returns how many events there were, and how many were missing."""
    watcher = oracle.Watcher(watched)
    all_events = missed = 0
    for number in numbers:
        look_around(chooser)
        count = chooser.choice((1, 1, 2, 3, 10, 60, 200))
        expected = json.loads(host(f"python3 $guest_dir/oracle.py {number} {count} {' '.join(DIRECTORIES)}"))
        events = watcher.until(f"{oracle.SENTINEL}{number}", wait)
        due = [tuple(event) for event in expected["events"] if event[0] in watched]
        got, wanted = oracle.streams(events), oracle.streams(due)
        what = f"round {number}: {expected['done']}"
        if count <= ALONE and watched == DIRECTORIES:
            assert not (bad := differences(got[0], wanted[0])), f"{what}: guest, host: {bad}"
            equal(got[1], wanted[1])
            equal(oracle.order(events), oracle.order(due))
        for name, stream in got[0].items():
            assert oracle.within(stream, wanted[0].get(name, [])), f"{what}: {name}: {stream}, on the host {wanted[0].get(name)}"
        all_events += oracle.size(wanted[0])
        missed += oracle.size(wanted[0]) - oracle.size(got[0])
        state_is(expected["state"], what)
    os.close(watcher.fd)
    return all_events, missed


def main():
    mount("s")
    mount("meet")
    agent = start_agent()
    os.chdir(S)
    host(f"mkdir -p {' '.join(DIRECTORIES)}")
    chooser = random.Random(seed)
    half = seed + rounds // 2
    for numbers, watched in ((range(seed, half), DIRECTORIES), (range(half, seed + rounds), DIRECTORIES[:2])):
        all_events, missed = compare(chooser, numbers, watched)
        print(f"ok {len(numbers)} rounds, {all_events} events in {watched}, {missed} of them not heard", flush=True)
        assert missed * FEW <= all_events, "too many events are missing"
    agent.terminate()
    equal(agent.wait(), 0)


main()
