"""A damaged, foreign or locked store file is reported with the fix; `doctor` changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from pipeline.commands import doctor
from pipeline.config.sections import Config, Store
from pipeline.model.errors import DamagedStore, FleetpulseError, Unreachable, UsageError
from pipeline.store.database import Database

Damage = Callable[[Path], None]
FILL = (
    "INSERT INTO hot_gpu (time, device, temperature) SELECT make_timestamptz(i), i % 100, random() FROM range({}) t(i)"
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def intact_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with 500,000 rows."""
    database = Database(tmp_path_factory.mktemp("intact") / "store.duckdb")
    with database.transaction() as connection:
        connection.execute(FILL.format(500_000))
    database.close()
    return database.path


@pytest.fixture(scope="module")
def killed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose process was killed: five commits of 1,000 rows are only in its write-ahead log."""
    path = tmp_path_factory.mktemp("killed") / "store.duckdb"
    program = f"""
import os
from pathlib import Path
from pipeline.store.database import Database
database = Database(Path({str(path)!r}))
database.connection.execute("CHECKPOINT")
for _ in range(5):
    with database.transaction() as connection:
        connection.execute({FILL.format(1000)!r})
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    return path


def copy_store(path: Path, folder: Path) -> Path:
    for file in path.parent.iterdir():
        shutil.copy(file, folder)
    return folder / path.name


def flip_byte(at: int) -> Damage:
    def apply(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at if at >= 0 else path.stat().st_size + at)
            there = file.read(8)
            file.seek(-8, os.SEEK_CUR)
            file.write(bytes(byte ^ 0xFF for byte in there))

    return apply


def find_block(path: Path, table: str, column: str) -> int:
    """Returns where in the file the first block of a column is: blocks of one size follow three headers of 4 KiB."""
    with duckdb.connect(str(path), read_only=True) as connection:
        size = connection.execute("SELECT block_size FROM pragma_database_size()").fetchall()[0][0]
        where = f"column_name = '{column}' AND segment_type <> 'VALIDITY' AND block_id >= 0"
        block = connection.execute(f"SELECT block_id FROM pragma_storage_info('{table}') WHERE {where}").fetchall()[0][
            0
        ]
    return int(3 * 4096 + block * size)


def truncate(at: float) -> Damage:
    """Keeps this number of bytes, or this fraction."""
    return lambda path: os.truncate(path, int(at if at > 1 else path.stat().st_size * at))


def other_program(path: Path) -> None:
    path.unlink()
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE accounts (number INTEGER)")


def other_meta(path: Path) -> None:
    path.unlink()
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE meta (number INTEGER)")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sqlite(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE a (b)")
    connection.close()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "checksum of the head": flip_byte(0),
    "version in the head": flip_byte(12),
    "head": flip_byte(100),
    "first header": flip_byte(4096),
    "second header": flip_byte(8192 + 16),
    "end": flip_byte(-5000),
    "cut in the head": truncate(100),
    "cut after the head": truncate(4096),
    "cut after the headers": truncate(12_288),
    "cut at a quarter": truncate(0.25),
    "cut in the middle": truncate(0.5),
    "cut before the end": truncate(0.99),
}
FOREIGN = {
    "magic": (flip_byte(8), "is not a DuckDB file"),
    "text": (lambda path: path.write_text("hello\n" * 1000), "is not a DuckDB file"),
    "SQLite": (sqlite, "is an SQLite database"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "folder": (folder, "Is a directory"),
    "DuckDB file of another program": (other_program, "of another program"),
    "DuckDB file with another table meta": (other_meta, "of another program"),
    "pipe": (pipe, "is a pipe"),
}


def test_an_empty_file_with_a_write_ahead_log_is_damaged(killed_store: Path, tmp_path: Path) -> None:
    """ "Nothing was ever stored in it; remove it" was wrong, and left the log for another file."""
    path = copy_store(killed_store, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DamagedStore, match=r"truncated.*store\.duckdb\.wal aside.*Recovery"):
        Database(path)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_reported_as_damaged_with_the_fix(intact_store: Path, tmp_path: Path, name: str) -> None:
    path = copy_store(intact_store, tmp_path)
    DAMAGE[name](path)
    with pytest.raises(DamagedStore) as found:
        Database(path)
    assert str(path) in str(found.value)
    assert "Recovery" in str(found.value)
    assert "another 'fleetpulse pipeline'" not in str(found.value)
    assert found.value.exit_code == 3


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_not_a_store_is_a_wrong_path(intact_store: Path, tmp_path: Path, name: str) -> None:
    path = copy_store(intact_store, tmp_path)
    apply, words = FOREIGN[name]
    apply(path)
    with pytest.raises(UsageError, match=words) as found:
        Database(path)
    assert found.value.exit_code == 2


@pytest.mark.slow
def test_a_file_without_read_permission_is_a_wrong_path(intact_store: Path, tmp_path: Path) -> None:
    path = copy_store(intact_store, tmp_path)
    path.chmod(0o000)
    program = f"""
import os
from pathlib import Path
from pipeline.model.errors import UsageError
from pipeline.store.database import open_file
os.getuid() or os.setuid(65534)  # root may read all
try:
    open_file(Path({str(path)!r}), {{}})
except UsageError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "cannot be read: Permission denied" in said.stdout, said.stderr


@pytest.mark.parametrize(
    ("apply", "rows"), [(truncate(0.6), 3000), (lambda p: p.write_bytes(p.read_bytes() + os.urandom(5000)), 5000)]
)
def test_a_truncated_log_ends_at_its_last_complete_commit(
    killed_store: Path, tmp_path: Path, apply: Damage, rows: int
) -> None:
    path = copy_store(killed_store, tmp_path)
    apply(path.with_name("store.duckdb.wal"))
    database = Database(path)
    [(found,)] = database.connection.execute("SELECT count(*) FROM hot_gpu").fetchall()
    database.close()
    assert found <= rows
    assert found % 1000 == 0


@pytest.mark.parametrize("apply", [flip_byte(8), flip_byte(100_000), flip_byte(-10_000)], ids=["head", "middle", "end"])
def test_a_damaged_log_is_named_and_the_store_opens_once_it_is_moved_away(
    killed_store: Path, tmp_path: Path, apply: Damage
) -> None:
    """Tests the documented recovery."""
    path = copy_store(killed_store, tmp_path)
    log = path.with_name("store.duckdb.wal")
    apply(log)
    with pytest.raises(DamagedStore, match=r"write-ahead log .*store\.duckdb\.wal is damaged"):
        Database(path)
    log.rename(path.with_name("store.duckdb.wal.damaged"))
    database = Database(path)
    assert database.connection.execute("SELECT count(*) FROM hot_gpu").fetchall() == [(0,)]
    database.close()


def test_damage_in_the_middle_is_reported_when_it_is_read(intact_store: Path, tmp_path: Path) -> None:
    from pipeline.store.database import explain_error

    path = copy_store(intact_store, tmp_path)
    flip_byte(find_block(path, "hot_gpu", "temperature") + 1000)(path)
    database = Database(path)
    with pytest.raises(duckdb.Error) as found:
        database.connection.execute("SELECT sum(temperature) FROM hot_gpu").fetchall()
    assert isinstance(explain_error(path, found.value), DamagedStore)
    database.close()


@pytest.mark.slow
def test_a_store_locked_by_another_process_is_not_reported_as_damaged(intact_store: Path, tmp_path: Path) -> None:
    database = Database(copy_store(intact_store, tmp_path))
    opening = f"Database(Path({str(database.path)!r}))"
    program = f"from pathlib import Path; from pipeline.store.database import Database; {opening}"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert f"process {os.getpid()} has it open" in said.stderr
    database.close()


def test_a_newer_storage_version_requires_an_upgrade(tmp_path: Path) -> None:
    from pipeline.store.database import explain_error

    text = (
        "IO Error: Trying to read a database file with storage version number 99, but we can only read storage "
        "versions between 64 and 70.\nThe database file was created with a newer version of DuckDB."
    )
    error = explain_error(tmp_path / "store.duckdb", duckdb.IOException(text))
    assert isinstance(error, UsageError)
    assert "upgrade fleetpulse" in str(error)


def file_digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", ["none", *DAMAGE, *FOREIGN])
def test_doctor_reports_the_damage_and_changes_nothing(killed_store: Path, tmp_path: Path, name: str) -> None:
    """Also for a store whose log holds commits that the file lacks."""
    path = copy_store(killed_store, tmp_path)
    apply: Damage | None = DAMAGE.get(name) or (FOREIGN[name][0] if name in FOREIGN else None)
    if apply is not None:
        apply(path)
    before = file_digests(tmp_path)
    check = doctor.store(dataclasses.replace(Config(), store=Store(path=path)))
    assert check.state == ("ok" if apply is None else "fail")
    assert not check.unreachable
    assert file_digests(tmp_path) == before


@pytest.mark.slow
def test_a_command_reports_the_damage_in_one_line(intact_store: Path, tmp_path: Path) -> None:
    path = copy_store(intact_store, tmp_path)
    DAMAGE["cut in the middle"](path)
    command = [sys.executable, "fleetpulse.py", "init"]
    environ = {**os.environ, "FLEETPULSE__STORE__PATH": str(path), "FLEETPULSE__SPOOL__DIRECTORY": str(tmp_path / "s")}
    said = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT)
    assert said.returncode == 3
    assert "Traceback" not in said.stderr
    assert "the file is damaged" in said.stderr.splitlines()[-1]


def test_a_schema_version_that_is_not_a_number_is_damage(intact_store: Path, tmp_path: Path) -> None:
    path = copy_store(intact_store, tmp_path)
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE meta SET value = 'x' WHERE key = 'schema_version'")
    with pytest.raises(DamagedStore, match="schema_version is 'x'"):
        Database(path)


def test_the_errors_have_one_base_class() -> None:
    assert issubclass(DamagedStore, Unreachable)
    assert issubclass(DamagedStore, FleetpulseError)
