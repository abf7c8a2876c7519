#!/usr/bin/python3
"""Databases with their data on passed-through files, and on the guest's tmpfs to compare: passthrough-databases.py TRANSACTIONS KEYS.
/host/programs has PostgreSQL and RocksDB."""

import glob
import os
import pwd
import subprocess
import sys

sys.path.insert(0, "/host")
from window import *

PROGRAMS = "/host/programs/usr"
POSTGRES = glob.glob(f"{PROGRAMS}/lib/postgresql/*/bin")[0]
transactions, keys = map(int, sys.argv[1:])
user = pwd.getpwnam("tests")
environment = {
    "PATH": f"{POSTGRES}:{PROGRAMS}/bin:/usr/sbin:/usr/bin",
    "LD_LIBRARY_PATH": f"{PROGRAMS}/lib/x86_64-linux-gnu",
    "PGHOST": "/tmp/pg",
    "PGDATABASE": "postgres",
    "TZ": "GMT",
}


def run(*command):
    """Runs a command as an ordinary user, for PostgreSQL wants no root, and returns its output."""
    # Servers keep a pipe open: files.
    with open("/tmp/said", "w+") as said:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment, user=user.pw_uid, group=user.pw_gid
        ).returncode
        said.seek(0)
        text = said.read()
    assert status == 0, f"{' '.join(command)[:100]}: status {status}: {text[-600:]}"
    print(f"{command[0]} has run", flush=True)
    return text


def own_directory(path):
    os.mkdir(path)
    os.chown(path, user.pw_uid, user.pw_gid)
    return path


def sql(text):
    return run("psql", "-X", "-A", "-t", "-c", text).strip()


def postgres(base):
    """pgbench; then the balances agree, after a restart, after a crash, and each page has its checksum."""
    data = f"{own_directory(f'{base}/postgres')}/data"
    run("initdb", "-D", data, "-k", "--no-locale", "-E", "UTF8", "-A", "trust", "-U", "tests")
    # Shared memory of parallel queries in files of the data directory too.
    options = "-c listen_addresses= -c unix_socket_directories=/tmp/pg -c timezone=GMT -c log_timezone=GMT -c dynamic_shared_memory_type=mmap"

    def start():
        run("pg_ctl", "-D", data, "-w", "-t", "600", "-l", f"{base}/postgres/log", "-o", options, "start")

    def agree(count):
        sums = sql(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches),"
            " (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(delta) FROM pgbench_history), (SELECT count(*) FROM pgbench_history)"
        ).split("|")
        equal((len(set(sums[:4])), int(sums[4])), (1, count))

    clients = 4
    start()
    run("pgbench", "-i", "-q", "-s", "3")
    print(run("pgbench", "-c", str(clients), "-t", str(transactions)), flush=True)
    agree(clients * transactions)
    sql("SET min_parallel_table_scan_size = 0; SET parallel_setup_cost = 0; SET debug_parallel_query = on; SELECT sum(abalance) FROM pgbench_accounts")
    run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    start()
    agree(clients * transactions)
    # Without -n it would empty the history.
    run("pgbench", "-n", "-c", str(clients), "-t", str(transactions))
    agree(2 * clients * transactions)
    run("pg_ctl", "-D", data, "-w", "-m", "fast", "stop")
    drop_caches()
    run("pg_checksums", "--check", "-D", data)
    start()
    agree(2 * clients * transactions)
    sql("VACUUM FULL")
    agree(2 * clients * transactions)
    run("pg_ctl", "-D", data, "-w", "-m", "fast", "stop")
    run("pg_checksums", "--check", "-D", data)
    subprocess.run(["rm", "-r", f"{base}/postgres"], check=True)


def rocksdb(base, *options):
    """db_bench, which verifies each block's checksum."""
    data = own_directory(f"{base}/rocksdb")
    common = (f"--db={data}", f"--num={keys}", "--threads=2", "--verify_checksum=1", "--compression_type=none", *options)
    # Small buffers: several files and compactions.
    common += ("--write_buffer_size=4000000", "--target_file_size_base=4000000")
    print(run("db_bench", "--benchmarks=fillseq,overwrite,readrandom,readwhilewriting,compact,verifychecksum", *common), flush=True)
    drop_caches()
    print(run("db_bench", "--benchmarks=readseq,readrandom,verifychecksum", "--use_existing_db=1", *common), flush=True)
    subprocess.run(["rm", "-r", data], check=True)


mount("meet")
mount("s")
own_directory("/tmp/pg")
for base in ("/tmp", S):
    steps(
        (postgres, base),
        (rocksdb, base),
        (rocksdb, base, "--mmap_read=1", "--mmap_write=1"),
        (rocksdb, base, "--use_direct_reads=1", "--use_direct_io_for_flush_and_compaction=1"),
    )
umount("s")
umount("meet")
