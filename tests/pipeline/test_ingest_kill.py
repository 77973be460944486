"""kill -9 of an ingesting process at random times: every row is stored once."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pipeline.model.records import SECOND

T0 = 1_780_000_000 * SECOND
NODES = 4
READER = """
import sys, time
from pathlib import Path
from pipeline.ingest.ingest import Ingest
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.spool import SpoolTransport
from pipeline.ingest import ingest as module
module.COMMIT_ROWS = 40  # many small commits: many moments to die in
folder = Path(sys.argv[1])
database = Database(folder / "store.duckdb")
transport = SpoolTransport(folder / "spool")
ingest = Ingest(database, transport, Devices(database.connection), lambda: time.time_ns() // 1000)
while ingest.step() is not None:
    print(".", flush=True)
"""


@pytest.mark.parametrize(("messages", "kills"), [(200, 3), pytest.param(600, 8, marks=pytest.mark.slow)])
def test_no_row_is_lost_or_doubled_when_ingest_is_killed_while_it_commits(site, messages, kills):
    for message in range(messages):
        for node in range(NODES):
            spool = site.spool(f"n{node}")
            spool.append(_body(f"n{node}", message), 1, 0)
    for spool in site.spools.values():
        spool.sync()
    rng, killed = random.Random(1), 0
    for _ in range(200):
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(site.folder)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        wanted = rng.randint(1, 12)
        for commits, _ in enumerate(reader.stdout, 1):
            if killed < kills and commits >= wanted:
                time.sleep(rng.uniform(0, 0.02))  # the kill falls anywhere within a commit
                reader.send_signal(signal.SIGKILL)
                killed += 1
                break
        reader.stdout.close()
        if reader.wait() == 0:
            break
    assert killed == kills
    site.open()
    assert site.rows("SELECT count(*), count(DISTINCT (time, entity)), sum(temperature) FROM gpu") == [
        (NODES * messages * 2, NODES * messages * 2, float(NODES * 2 * sum(range(messages))))
    ]
    assert site.rows("SELECT count(*) FROM gaps") == [(0,)]


def _body(node: str, message: int) -> bytes:
    import numpy as np

    from pipeline.model.records import Batch, Block, Origin
    from pipeline.transport import wire

    columns = {"gpu.temperature": np.full((1, 2), message, "f4")}
    block = Block("gpu", (f"gpu:{node}.0", f"gpu:{node}.1"), columns)
    return wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([T0 + message * SECOND]), (block,)))
