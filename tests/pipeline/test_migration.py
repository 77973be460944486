"""Stores that earlier versions wrote, opened by today's: a backup first, one transaction, and the way back."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.operation import run_restore
from pipeline.model.errors import Unreachable
from pipeline.model.records import SECOND
from pipeline.store import schema
from pipeline.store.backup_check import find_damage
from pipeline.store.database import Database
from tests.old_versions import SCHEMA_2, SCHEMA_3, WIRE_1, check_out, run_old
from tests.pipeline.conftest import Site
from tests.pipeline.test_backup import TOTALS, config_of

pytestmark = pytest.mark.slow
T0 = 1_780_000_000 * SECOND
IMPORTS = """
import sys
from pathlib import Path
import numpy as np
try:
    from agents.node.spool.spool import Spool
    from pipeline.ingest.ingest import Ingest
    from pipeline.model.records import SECOND, Batch, Block, Origin
    from pipeline.transport import wire
except ImportError:  # the names of then
    from agents.spool import Spool
    from pipeline import wire
    from pipeline.ingest import Ingest
    from pipeline.records import SECOND, Batch, Block, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.spool import SpoolTransport
folder, first, until, T0 = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 1_780_000_000 * SECOND
"""
INGEST = (
    IMPORTS
    + """
with Spool(folder / "spool", "n1", "telemetry.v1", free_bytes=0) as spool:
    for n in range(first, until):
        columns = {"gpu.temperature": np.full((1, 2), n, "f4"), "gpu.sm_clock": np.full((1, 2), 1000 + n, "u2")}
        block = Block("gpu", ("gpu:n1.0", "gpu:n1.1"), columns)
        batch = Batch(Origin("local", "n1", b"b" * 16), np.array([T0 + n * SECOND]), (block,))
        spool.append(wire.encode(batch), wire.TELEMETRY_KIND, T0)
    spool.sync()
database = Database(folder / "store.duckdb")
transport = SpoolTransport(folder / "spool")
ingest = Ingest(database, transport, Devices(database.connection), lambda: T0 + 100 * SECOND)
while ingest.step() is not None:
    pass
transport.close()
print(database.connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()[0][0])
print(database.connection.execute("SELECT count(*), sum(temperature) FROM gpu").fetchall()[0])
database.close()
"""
)
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from pipeline.store import backup, database, schema
left = int(sys.argv[2])
def counted(act):
    def call(*given, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*given, **more)
    return call
class Connection:
    def __init__(self, real):
        self.real, self.execute = real, counted(real.execute)
    def __getattr__(self, name):
        return getattr(self.real, name)
backup.BackupWriter._copy_store = counted(backup.BackupWriter._copy_store)
backup.BackupWriter._settle = counted(backup.BackupWriter._settle)
backup.BackupWriter._finish = counted(backup.BackupWriter._finish)
connect = database.Database._connect
database.Database._connect = lambda self: Connection(connect(self))
database.Database(Path(sys.argv[1])).close()
"""


@pytest.fixture(scope="module", params=[(WIRE_1, "1"), (SCHEMA_2, "2"), (SCHEMA_3, "3")], ids="schema-{0[1]}".format)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Returns the tree of an earlier version, a folder with a store and spool of it, and its schema version."""
    commit, version = request.param
    folder = tmp_path_factory.mktemp("old")
    tree, data = check_out(commit, folder / "tree"), folder / "data"
    data.mkdir()
    assert run_old(tree, INGEST, data, "0", "20").splitlines() == [version, "(40, 380.0)"]
    return tree, data, version


@pytest.fixture
def data(old: tuple[Path, Path, str], tmp_path: Path) -> Path:
    """Returns a copy of the folder for one test."""
    return Path(shutil.copytree(old[1], tmp_path / "data"))


def schema_of(store: Path) -> str:
    """Returns the schema version of a store, without migrating it."""
    import duckdb

    with duckdb.connect(str(store), read_only=True) as connection:
        return str(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()[0][0])


def test_a_store_of_an_earlier_version_is_backed_up_migrated_and_continued(old, data):
    version, site = old[2], Site(data)
    site.send("n1", T0 + 20 * SECOND, 1, 20)
    ingest = site.drain()
    kept = data / f"store.duckdb.schema-{version}"
    assert site.rows("SELECT value FROM meta WHERE key = 'schema_version'") == [(str(schema.SCHEMA_VERSION),)]
    assert site.rows(TOTALS) == [(42, 42, 420.0)]
    assert site.rows("SELECT * FROM gaps") == []
    del ingest
    site.shut()
    for spool in site.spools.values():
        spool.close()
    assert find_damage(kept) == []
    assert schema_of(kept / "store.duckdb") == version


def test_the_backup_is_the_way_back_to_the_earlier_version_which_continues(old, data):
    tree, _, version = old
    Database(data / "store.duckdb").close()
    assert schema_of(data / "store.duckdb") == str(schema.SCHEMA_VERSION)
    run_restore(config_of(data), data / f"store.duckdb.schema-{version}", True, lambda _: None)
    assert run_old(tree, INGEST, data, "20", "30").splitlines() == [version, "(60, 870.0)"]
    Database(data / "store.duckdb").close()  # the second upgrade makes a new backup
    kept = data / f"store.duckdb.schema-{version}"
    with Database(kept / "store.duckdb", keep_older=False).cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM gpu").fetchall() == [(60,)]


def test_without_space_for_the_backup_the_store_is_not_migrated(old, data):
    with pytest.raises(Unreachable, match=r"migration_backup = false"):
        Database(data / "store.duckdb", free_bytes=1 << 60)
    assert schema_of(data / "store.duckdb") == old[2]
    Database(data / "store.duckdb", free_bytes=1 << 60, keep_older=False).close()
    assert schema_of(data / "store.duckdb") == str(schema.SCHEMA_VERSION)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 9, 11, 14, 20, 40, 80, 120])
def test_a_kill_while_it_is_migrated_leaves_the_old_or_the_new_store(old, data, step):
    command = [sys.executable, "-c", KILLED, str(data / "store.duckdb"), str(step)]
    code = subprocess.run(command, cwd=os.getcwd()).returncode
    assert code in (-signal.SIGKILL, 0)
    assert schema_of(data / "store.duckdb") in (old[2], str(schema.SCHEMA_VERSION))
    site = Site(data)
    site.drain()
    assert site.rows(TOTALS) == [(40, 40, 380.0)]
    site.shut()
    assert find_damage(data / f"store.duckdb.schema-{old[2]}") == []
    assert not list(data.glob("*.partial"))


def test_a_store_of_this_schema_is_opened_without_a_backup(tmp_path):
    for _ in range(2):
        Database(tmp_path / "store.duckdb").close()
    assert [path.name for path in tmp_path.iterdir()] == ["store.duckdb"]
