#!/usr/bin/python3
"""Programs work on passed-through files."""

import os
import subprocess
import sys

sys.path.insert(0, "/host")
from window import *


def run(*command, cwd=S, said=None, **options):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command)[:100]}: status {done.returncode}: {done.stderr[-300:]}"
    if said is not None:
        equal(done.stdout.strip(), said)
    return done.stdout


# A write-ahead log; the database is read through a mapping.
SETTINGS = "PRAGMA busy_timeout=60000; PRAGMA journal_mode=wal; PRAGMA mmap_size=268435456;"
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"


def sql(text):
    return run("sqlite3", "db", input=SETTINGS + text).split("\n")[3:]


def sqlite():
    sql("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c INTEGER); CREATE INDEX x ON t(b);")
    sql(f"INSERT INTO t {ROWS} SELECT i, hex(randomblob(50)), i * i FROM n;")
    # Two writers and one reader at the same time.
    others = [
        subprocess.Popen(
            ["sqlite3", "db"], cwd=S, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(3)
    ]
    for number, other in enumerate(others):
        work = [
            f"INSERT INTO t(b, c) VALUES(hex(randomblob(40)), {n}); UPDATE t SET c = c + 1 WHERE a = {number};"
            if number < 2
            else "SELECT sum(length(b)) FROM t;"
            for n in range(100)
        ]
        other.stdin.write(SETTINGS + "\n".join(work))
        other.stdin.close()
    for other in others:
        said = other.stdout.read()
        assert other.wait() == 0 and "rror" not in said, f"sqlite3: {said[-300:]}"
    sql("DELETE FROM t WHERE a % 3 = 0; PRAGMA wal_checkpoint(TRUNCATE);")
    # Two thirds of 5,000 and 2 × 100 rows.
    equal(sql("SELECT count(*), sum(a <= 5000) FROM t;")[0], "3467|3334")
    sql("VACUUM;")
    equal(sql("PRAGMA integrity_check;")[0], "ok")
    drop_caches()
    equal(sql("PRAGMA integrity_check;")[0], "ok")


SOURCES = 20


def project(directory):
    os.mkdir(directory)
    for number in range(SOURCES):
        write(
            f"{directory}/f{number}.c",
            f'#include "all.h"\n#include <stdio.h>\nint f{number}(int x) {{ return x + {number}; }}\n'.encode()
            + b"".join(b"static const char *t%d = \"%s\";\n" % (n, b"x" * 90) for n in range(40))
            + f"const char *g{number}(void) {{ return t{number % 40}; }}\n".encode(),
        )
    write(f"{directory}/all.h", "".join(f"int f{n}(int x);\n" for n in range(SOURCES)).encode())
    calls = " + ".join(f"f{n}(1)" for n in range(SOURCES))
    write(
        f"{directory}/main.c",
        f'#include "all.h"\n#include <stdio.h>\nint main(void) {{ printf("%d\\n", {calls}); return 0; }}\n'.encode(),
    )
    objects = " ".join(f"f{n}.o" for n in range(SOURCES))
    write(
        f"{directory}/Makefile",
        f"prog: main.o {objects}\n\t$(CC) -o $@ $^\n%.o: %.c all.h\n\t$(CC) -g -c -o $@ $<\n".encode(),
    )


SUM = str(SOURCES + SOURCES * (SOURCES - 1) // 2)
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "safe.directory=*", "-c", "protocol.file.allow=always")


def git():
    project(f"{S}/project")
    repository = f"{S}/project"
    write(f"{repository}/large", os.urandom(3 << 20))
    run(*GIT, "init", "-q", cwd=repository)
    for number in range(3):
        write(f"{repository}/changed", b"%d" % number)
        run(*GIT, "add", "-A", cwd=repository)
        run(*GIT, "commit", "-qm", f"commit {number}", cwd=repository)
    run(*GIT, "gc", "-q", cwd=repository)
    run(*GIT, "clone", "-q", "--no-local", "project", "clone")
    run(*GIT, "fsck", "--full", "--strict", cwd=f"{S}/clone")
    run(*GIT, "status", "--porcelain", cwd=f"{S}/clone", said="")
    equal(read(f"{S}/clone/large"), read(f"{repository}/large"))


def gcc():
    """Builds what was cloned. The host runs it too."""
    run("make", "-j2", cwd=f"{S}/clone")
    run("./prog", cwd=f"{S}/clone", said=SUM)
    drop_caches()
    run("./prog", cwd=f"{S}/clone", said=SUM)
    equal(host_number("cd clone && ./prog"), int(SUM))
    # Overwrite a file that was executed.
    os.utime(f"{S}/clone/all.h")
    run("make", cwd=f"{S}/clone")
    run("./prog", cwd=f"{S}/clone", said=SUM)


mount("meet")
mount("s")
steps((sqlite,), (git,), (gcc,))
umount("s")
umount("meet")
