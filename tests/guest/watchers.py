#!/usr/bin/env python3
"""What the host does to the share reaches programs of the guest that watch files."""

import subprocess
import sys
import time
from contextlib import contextmanager

sys.path.insert(0, "/host")
from window import *

# A limit on hangs, in seconds. Node starts slowly on a busy machine.
LIMIT = 100

WATCHDOG = """
import sys, watchdog.events, watchdog.observers
class Handler(watchdog.events.FileSystemEventHandler):
    def on_any_event(self, event):
        print(event.event_type, event.is_directory, event.src_path, event.dest_path, flush=True)
observer = watchdog.observers.Observer()
observer.schedule(Handler(), sys.argv[1], recursive=True)
observer.start()
print("ready", flush=True)
observer.join()
"""
FS_WATCH = """
for (const path of process.argv.slice(1))
    require('fs').watch(path, (event, name) => console.log(path, event, name));
console.log('ready');
"""
CHOKIDAR = """
const watcher = require('/usr/share/nodejs/chokidar').watch(process.argv[1]);
watcher.on('all', (event, path) => console.log(event, path)).on('ready', () => console.log('ready'));
"""


class Program:
    def __init__(self, process, out):
        self.process, self.out = process, out

    def lines(self):
        return read(self.out).decode().splitlines()

    def shows(self, *due):
        """Waits for these lines, which may come in any order, among others."""
        deadline = time.monotonic() + LIMIT
        while set(due) - set(self.lines()):
            assert self.process.poll() is None, f"it has ended: {self.lines()}"
            assert time.monotonic() < deadline, f"it shows {self.lines()}, expected {due}"
            time.sleep(0.02)

    def reacts(self, command, due):
        """The host repeats the command until this line comes: the program misses changes that come too soon."""
        deadline = time.monotonic() + LIMIT
        while due not in self.lines():
            assert time.monotonic() < deadline, f"it shows {self.lines()}, expected {due}"
            host(command)
            time.sleep(0.2)


@contextmanager
def program(*command, files=None):
    """Runs it with its output in a file. `files`: its input, a list of names."""
    out = f"/tmp/{command[0]}.out"
    with open(out, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)
    process.stdin.write("".join(f"{name}\n" for name in files or ()).encode())
    process.stdin.close()
    try:
        yield Program(process, out)
    finally:
        process.kill()
        process.wait()


def directory(name):
    host(f"mkdir {name} && echo 0 >{name}/old")
    return f"{S}/{name}"


def inotifywait():
    d = directory("inotifywait")
    with program("inotifywait", "-m", "--format", "%w %e %f %c", d, f"{d}/old") as seen:
        seen.shows("Watches established.")
        host("cd inotifywait && echo 1 >new && chmod 600 new && mv new moved && mkdir sub && rm moved && echo 1 >>old && rm old")
        seen.shows(f"{d}/old DELETE_SELF  0", f"{d}/ DELETE old 0")
        # Of its own: the path, the event, the name, and a rename's cookie, or 0.
        events = [line.removeprefix(d).split(" ") for line in seen.lines()[2:]]
        # The agent opens a file to close it after writing.
        events = [event for event in events if event[1] != "OPEN"]
        cookies = [cookie for *_, cookie in events if cookie != "0"]
        equal((len(cookies), len(set(cookies))), (2, 1))
        got = [f"{what} {name}" for path, what, name, _ in events if path == "/"]
        # It is told with the contents if the agent was busy when they came.
        assert "ATTRIB new" in got[:4], got
        got.remove("ATTRIB new")
        due = ("CREATE new", "MODIFY new", "CLOSE_WRITE,CLOSE new", "MOVED_FROM new", "MOVED_TO moved")
        due += ("CREATE,ISDIR sub", "DELETE moved", "MODIFY old", "CLOSE_WRITE,CLOSE old", "DELETE old")
        equal(got, list(due))
        itself = sorted(what for path, what, *_ in events if path == "/old")
        equal(itself, ["ATTRIB", "CLOSE_WRITE,CLOSE", "DELETE_SELF", "MODIFY"])


def entr():
    d = directory("entr")
    with program("entr", "-n", "sh", "-c", f"cat {d}/old", files=[f"{d}/old"]) as seen:
        seen.shows("0")
        seen.reacts("echo 1 >entr/old", "1")
        # As editors do it.
        seen.reacts("echo 2 >entr/new && mv entr/new entr/old", "2")
        seen.reacts("echo 3 >entr/old", "3")


def watchdog():
    d = directory("watchdog")
    with program("python3", "-c", WATCHDOG, d) as seen:
        seen.shows("ready")
        host("cd watchdog && echo 1 >new")
        seen.shows(f"created False {d}/new ", f"modified False {d}/new ", f"closed False {d}/new ")
        host("cd watchdog && mv new moved && rm old && mkdir sub")
        seen.shows(f"moved False {d}/new {d}/moved", f"deleted False {d}/old ", f"created True {d}/sub ")


def fs_watch():
    d = directory("fs_watch")
    with program("node", "-e", FS_WATCH, d, f"{d}/old") as seen:
        seen.shows("ready")
        host("cd fs_watch && echo 1 >new && echo 1 >>old && mv new moved && rm moved")
        seen.shows(f"{d} rename new", f"{d} change new", f"{d} change old", f"{d}/old change old", f"{d} rename moved")
        host("rm fs_watch/old")
        seen.shows(f"{d} rename old", f"{d}/old rename old")


def chokidar():
    d = directory("chokidar")
    with program("node", "-e", CHOKIDAR, d) as seen:
        seen.shows("ready", f"add {d}/old")
        host("echo 1 >chokidar/new && echo 1 >>chokidar/old && mkdir chokidar/sub")
        seen.shows(f"add {d}/new", f"change {d}/old", f"addDir {d}/sub")
        # It reads a new directory first and watches it then.
        seen.reacts("echo 1 >>chokidar/sub/deep", f"add {d}/sub/deep")
        host("rm chokidar/new")
        seen.shows(f"unlink {d}/new")
        host("rm -r chokidar/sub")
        seen.shows(f"unlink {d}/sub/deep", f"unlinkDir {d}/sub")


mount("s")
mount("meet")
start_agent()
for part in inotifywait, entr, watchdog, fs_watch, chokidar:
    part()
    print("ok", part.__name__, flush=True)
