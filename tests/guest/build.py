"""build.py DIR: unpacks and compiles a small C project in DIR and prints the seconds that each step took."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time

# As many files as a small library has. Each includes some headers, which include others.
SOURCES, HEADERS, DEPTH = 16, 32, 4
target = os.path.join(sys.argv[1], "project")


def header(n):
    deeper = "".join(f'#include "h{n + step}.h"\n' for step in range(1, DEPTH) if n + step < HEADERS)
    lines = "".join(f"static inline int f{n}_{k}(int x) {{ return x * {k} + {n}; }}\n" for k in range(40))
    return f"#ifndef H{n}\n#define H{n}\n{deeper}{lines}#endif\n"


def source(n):
    includes = "".join(f'#include "h{(n + k * 7) % HEADERS}.h"\n' for k in range(8))
    return f"#include <stdio.h>\n#include <stdlib.h>\n{includes}int part{n}(int x) {{ return f{n % HEADERS}_3(x); }}\n"


def project():
    files = {f"include/h{n}.h": header(n) for n in range(HEADERS)}
    files |= {f"src/p{n}.c": source(n) for n in range(SOURCES)}
    calls = " + ".join(f"part{n}(1)" for n in range(SOURCES))
    parts = "".join(f"int part{n}(int);\n" for n in range(SOURCES))
    files["src/main.c"] = f"#include <stdio.h>\n{parts}int main(void) {{ return printf(\"%d\\n\", {calls}) < 0; }}\n"
    files["Makefile"] = "prog: $(patsubst %.c,%.o,$(wildcard src/*.c))\n\tgcc -o $@ $^\n%.o: %.c\n\tgcc -O1 -Iinclude -c -o $@ $<\n"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"project/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return archive.getvalue()


def build():
    subprocess.run(["tar", "x", "-C", sys.argv[1]], input=archive, check=True)
    subprocess.run(["make", "-s", "-j2", "-C", target], check=True)
    subprocess.run([os.path.join(target, "prog")], check=True, stdout=subprocess.DEVNULL)


archive = project()
# The compiler is read from the guest's own disk, which is not to be measured. This puts it into the cache.
subprocess.run(["gcc", "-O1", "-x", "c", "-o", "/tmp/warm", "-"], input=b"#include <stdio.h>\nint main(void){return 0;}", check=True)
before = time.monotonic()
build()
print(time.monotonic() - before)
shutil.rmtree(target)
