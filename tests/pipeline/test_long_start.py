"""A start that takes long, since it backs up and migrates a large store: the manager's limits, and a stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from pipeline.model.errors import Interrupted
from pipeline.runtime import long_start
from pipeline.runtime.long_start import LongStart
from pipeline.runtime.systemd import SystemdNotifier
from pipeline.store import backup_check, schema
from pipeline.store.backup import BackupWriter
from pipeline.store.backup_check import find_damage
from pipeline.store.database import Database

ROOT = Path(__file__).parents[2]
SLOW = """
import os, sys, time
import fleetpulse
from pipeline.store import backup
class Slow:
    def __getattr__(self, name):
        return getattr(os, name)
    def pread(self, handle, size, at):
        time.sleep(0.05)
        return os.pread(handle, size, at)
backup.os, backup._PIECE = Slow(), 4096  # a copy of 400 KiB takes 5 s
sys.exit(fleetpulse.main())
"""


def make_old(store: Path) -> None:
    """Makes a store that has the number of the schema before ours."""
    Database(store).close()
    with duckdb.connect(str(store)) as connection:
        connection.execute(f"UPDATE meta SET value = '{schema.SCHEMA_VERSION - 1}' WHERE key = 'schema_version'")


def schema_of(store: Path) -> int:
    """Returns the schema version, without migrating it."""
    with duckdb.connect(str(store), read_only=True) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()[0][0])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_old(path := tmp_path / "store.duckdb")
    return path


def backup_of(store: Path) -> Path:
    return store.with_name(f"store.duckdb.schema-{schema.SCHEMA_VERSION - 1}")


@pytest.mark.slow
def test_a_slow_backup_asks_the_manager_for_time_and_a_stop_ends_it_at_once(store: Path) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(store.parent / "notify"))
    manager.settimeout(20)
    (config := store.parent / "fleetpulse.toml").write_text(
        f"[store]\npath = '{store}'\n[spool]\ndirectory = '{store.parent}/spool'\n[api]\nport = 0\n"
    )
    environ = {**os.environ, "NOTIFY_SOCKET": str(store.parent / "notify")}
    words = [sys.executable, "-c", SLOW, "pipeline", "--config", str(config)]
    with subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            while "MiB" not in (said := manager.recv(4096).decode()):
                assert said.startswith("EXTEND_TIMEOUT_USEC=300000000\nSTATUS=")
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert process.wait(20) == 0
            took = time.monotonic() - began
            assert process.stderr is not None
            text = process.stderr.read()
        finally:
            process.kill()
    manager.setblocking(False)
    rest = [manager.recv(4096).decode()]
    while not rest[-1].startswith("STOPPING"):
        rest.append(manager.recv(4096).decode())
    manager.close()
    assert "is backed up before its migration" in said
    assert not any(one.startswith("READY") for one in rest)
    assert "Traceback" not in text
    assert "stopped while starting" in text
    assert took < 3.0
    assert schema_of(store) == schema.SCHEMA_VERSION - 1
    assert not backup_of(store).exists()
    Database(store).close()
    assert schema_of(store) == schema.SCHEMA_VERSION
    assert schema_of(backup_of(store) / "store.duckdb") == schema.SCHEMA_VERSION - 1


def fail_once(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """Lets a start end between backup and migration."""
    with monkeypatch.context() as patched:
        patched.setattr(schema, "create_tables", lambda *_: (_ for _ in ()).throw(Interrupted("here")))
        with pytest.raises(Interrupted):
            Database(store)


def test_a_complete_backup_of_the_same_store_is_kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, store)
    before = os.stat(backup_of(store) / "store.duckdb").st_ino
    Database(store).close()
    assert os.stat(backup_of(store) / "store.duckdb").st_ino == before
    assert schema_of(store) == schema.SCHEMA_VERSION


@pytest.mark.parametrize("log", [False, True], ids=["checkpoint", "log"])
def test_a_store_that_was_written_since_is_backed_up_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, log: bool
) -> None:
    fail_once(monkeypatch, store)
    script = f"""import duckdb, os
connection = duckdb.connect({str(store)!r})
connection.execute("INSERT INTO meta VALUES ('said', 'later')")
{"os._exit(0)" if log else "connection.close()"}
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    Database(store).close()
    with duckdb.connect(str(backup_of(store) / "store.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'said'").fetchall() == [("later",)]


def truncate(backup: Path) -> None:
    os.truncate(backup / "store.duckdb", 8192)


def zero(backup: Path) -> None:
    with open(backup / "store.duckdb", "r+b") as file:
        file.seek(12_288)
        file.write(bytes(65_536))


def spoil_manifest(backup: Path) -> None:
    path = backup / "MANIFEST.json"
    path.write_text(path.read_text().replace('"history": []', '"history": 1'))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "zeroed": zero,
    "without the store": lambda backup: (backup / "store.duckdb").unlink(),
    "without checksums": lambda backup: (backup / "SHA256SUMS").unlink(),
    "without lines": lambda backup: (backup / "SHA256SUMS").write_text(""),
    "manifest that is a list": lambda backup: (backup / "MANIFEST.json").write_text("[]"),
    "manifest that differs": spoil_manifest,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup_is_written_again_before_the_migration(
    store: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """It was kept by its manifest alone, and after the migration there was no way back."""
    fail_once(monkeypatch, store)
    DAMAGES[damage](backup_of(store))
    Database(store).close()
    assert schema_of(store) == schema.SCHEMA_VERSION
    assert find_damage(backup_of(store)) == []
    assert schema_of(backup_of(store) / "store.duckdb") == schema.SCHEMA_VERSION - 1


def test_the_check_of_a_kept_backup_tells_its_progress_and_a_stop_ends_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, store)
    before = os.stat(backup_of(store) / "store.duckdb").st_ino
    monkeypatch.setattr(backup_check, "REPORT_EVERY_S", 0.0)
    told: list[str] = []
    stop = threading.Event()

    class Told(LongStart):
        def tell(self, doing: str = "") -> None:
            told.append(doing)
            if "checksums: 2 of 2 files" in doing:
                stop.set()
            super().tell(doing)

    with pytest.raises(Interrupted, match=r"checksums: 2 of 2 files, [0-9]+ MiB"):
        Database(store, start=Told(stop))
    assert any("is backed up before its migration: checksums of" in one for one in told)
    assert schema_of(store) == schema.SCHEMA_VERSION - 1
    assert os.stat(backup_of(store) / "store.duckdb").st_ino == before
    assert find_damage(backup_of(store)) == []


def test_a_restored_store_is_backed_up_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may reach the same headers as the one that was backed up, with other rows."""
    fail_once(monkeypatch, store)
    written: list[Path] = []
    write = BackupWriter.write
    monkeypatch.setattr(BackupWriter, "write", lambda self, source: (written.append(self.target), write(self, source)))
    (again := store.with_name("again")).write_bytes(store.read_bytes())
    os.replace(again, store)
    Database(store).close()
    assert written == [backup_of(store)]


def test_a_stop_in_the_migration_undoes_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def migrate(connection: duckdb.DuckDBPyConnection, *_: object) -> None:
        connection.execute("CREATE TABLE half (a INTEGER)")
        threading.Timer(0.2, stop.set).start()
        connection.execute("SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b").fetchall()

    monkeypatch.setattr(schema, "create_tables", migrate)
    start = LongStart(stop)
    with start.extended(), pytest.raises(Interrupted, match=f"migration of schema {schema.SCHEMA_VERSION - 1}"):
        Database(store, keep_older=False, start=start)
    assert schema_of(store) == schema.SCHEMA_VERSION - 1
    with duckdb.connect(str(store), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'half'").fetchall() == [(0,)]


def test_without_progress_no_more_time_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_start, "STEP_LIMIT_S", 1.2)
    monkeypatch.setattr(long_start, "EXTEND_EVERY_S", 0.1)
    monkeypatch.setattr(long_start, "_TICK_S", 0.1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    listener.bind(address := str(tmp_path / "notify"))
    manager = SystemdNotifier({"NOTIFY_SOCKET": address})
    start = LongStart(None, manager)
    with start.extended():
        start.tell("migrates\nnow")
        time.sleep(1.6)
        assert set(received(listener)) == {"EXTEND_TIMEOUT_USEC=300000000\nSTATUS=migrates now"}
        time.sleep(0.5)
        assert received(listener) == []
        start.tell("goes on")
        time.sleep(0.5)
        assert set(received(listener)) == {"EXTEND_TIMEOUT_USEC=300000000\nSTATUS=goes on"}
    manager.close()
    listener.close()


def received(listener: socket.socket) -> list[str]:
    """Returns the messages that wait."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(listener.recv(4096).decode())
    return found
