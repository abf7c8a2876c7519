"""A thousand changes of ten kinds and more, and the events of inotify(7) that they cause in the directories `old` and `new`. Runs on the
host too: changes.py DIR START END."""

import os
import sys
from collections import Counter

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
ISDIR = 0x40000000
# These are about a name.
NAMES = MOVED_FROM | MOVED_TO | CREATE | DELETE


def change(directory, start, end):
    """11 changes for each number."""
    os.chdir(directory)
    for number in range(start, end):
        name = f"old/{number}"
        with open(name, "xb", buffering=0) as file:
            file.write(b"some")
        os.chmod(name, 0o600)
        os.symlink("nowhere", f"old/s{number}")
        os.link(name, f"new/l{number}")
        os.mkdir(f"new/d{number}")
        os.rename(name, f"new/{number}")
        os.unlink(f"new/{number}")
        os.unlink(f"new/l{number}")
        os.rmdir(f"new/d{number}")
        os.unlink(f"old/s{number}")


def due(start, end):
    """The events, as (directory, mask, name). No two changes of one kind have the same name, so none are merged."""
    events = Counter()
    for number in range(start, end):
        name = str(number)
        events.update(("old", mask, name) for mask in (CREATE, MODIFY, CLOSE_WRITE, ATTRIB, MOVED_FROM))
        events.update(("new", mask, name) for mask in (MOVED_TO, DELETE))
        events.update(("old", mask, f"s{name}") for mask in (CREATE, DELETE))
        events.update(("new", mask, f"l{name}") for mask in (CREATE, DELETE))
        events.update(("new", mask | ISDIR, f"d{name}") for mask in (CREATE, DELETE))
    return events


if __name__ == "__main__":
    change(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
