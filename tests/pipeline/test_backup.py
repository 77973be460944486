"""Backups of a store that is written during them, their restore, and kill -9 at each step of both."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pytest

from pipeline.commands.operation import run_backup, run_restore
from pipeline.config import sections
from pipeline.model.errors import DamagedStore, Refused, Unreachable, UsageError
from pipeline.model.records import SECOND
from pipeline.store import backup, database
from pipeline.store.backup import MANIFEST, STORE, SUMS, BackupWriter, Checkpoints
from pipeline.store.backup_check import find_damage, read_manifest
from pipeline.store.history_files import SealedFile
from tests.pipeline.conftest import NOW, Site

T0 = 1_780_000_000 * SECOND
TOTALS = "SELECT count(*), count(DISTINCT (time, entity)), sum(temperature) FROM gpu"


def checkpoints(site: Site, **more) -> Checkpoints:
    return Checkpoints(
        site.folder / "store.duckdb", site.database.lock, site.database.cursor, "local", lambda: NOW, **more
    )


def config_of(folder: Path, **store) -> sections.Config:
    return sections.Config(
        store=sections.Store(folder / "store.duckdb", **{"free_bytes": 0, **store}),
        spool=sections.Spool(folder / "spool"),
        api=sections.Api(port=1),  # nothing listens there
    )


def totals(folder: Path) -> list[tuple[object, ...]]:
    """Returns the totals of the rows in the copy of a store, after its next start."""
    opened = database.Database(folder / "store.duckdb")
    try:
        return opened.connection.execute(TOTALS).fetchall()
    finally:
        opened.close()


@pytest.fixture
def filled(site: Site) -> Site:
    for second in range(0, 300, 10):
        site.send("n1", T0 + second * SECOND, 10, second)
    site.drain()
    return site


class TestWhileIngestGoesOn:
    @pytest.mark.parametrize("rows", [20, pytest.param(60_000, marks=pytest.mark.slow)])
    def test_a_backup_is_the_store_of_its_begin_whatever_is_committed_deleted_or_updated_meanwhile(
        self, filled, tmp_path, rows
    ):
        ingest, before, begun = filled.drain(), filled.rows(TOTALS), []

        def write_on(step: str) -> None:
            if step != "begun":
                return
            begun.append(1)
            for number in range(12):
                filled.send("n2", T0 + number * SECOND, 1, number)
                ingest.step()
                with filled.database.transaction() as connection:
                    connection.execute(
                        f"INSERT INTO hot_gpu BY NAME SELECT make_timestamptz({T0}) AS time, 0 AS device "
                        f"FROM range({rows})"
                    )
                    if number % 3 == 0:  # commits that only insert are checkpointed beside other transactions
                        connection.execute("DELETE FROM hot_gpu WHERE time > make_timestamptz(0)")
                        connection.execute("UPDATE sender SET apart = 7")
            with pytest.raises(duckdb.TransactionException, match="write transactions"):
                filled.database.connection.execute("CHECKPOINT")

        writer = BackupWriter(tmp_path / "copy", step=write_on)
        writer.write(checkpoints(filled))
        filled.shut()
        writer.close()
        assert totals(tmp_path / "copy") == before
        assert begun == [1]  # checkpoints were held, so the first copy counts

    def test_a_partition_whose_commits_expired_keeps_its_offset_in_the_backup(self, filled):
        before = checkpoints(filled).describe().offsets
        filled.database.connection.execute("DELETE FROM ingest_commit")
        assert checkpoints(filled).describe().offsets == before != ()

    @pytest.mark.slow
    def test_checkpoints_go_on_after_a_backup(self, filled, tmp_path):
        writer = BackupWriter(tmp_path / "copy")
        writer.write(checkpoints(filled))
        filled.database.connection.execute("CHECKPOINT")
        assert not backup.log_path(filled.folder / "store.duckdb").exists()
        filled.shut()
        writer.close()

    def test_a_second_backup_at_the_same_time_is_refused(self, filled):
        source = checkpoints(filled)
        moment = source.begin()
        with pytest.raises(Refused, match="another backup"):
            source.begin()
        assert source.end(moment.id)
        assert not source.end(moment.id)
        assert source.end(source.begin().id)

    def test_a_copy_that_is_never_ended_holds_checkpoints_no_longer_than_its_lease(self, filled):
        now = [0.0]
        source = checkpoints(filled, monotonic=lambda: now[0])
        moment = source.begin()
        now[0] = backup.LEASE_S + 1
        source.expire()
        filled.database.connection.execute("CHECKPOINT")
        assert not source.end(moment.id)

    def test_a_log_that_grows_over_its_bound_ends_the_hold(self, filled, monkeypatch):
        source = checkpoints(filled)
        source.begin()
        monkeypatch.setattr(backup, "MAX_LOG_BYTES", 10_000)
        with filled.database.transaction() as connection:
            connection.execute("INSERT INTO meta SELECT range, repeat('x', 1000) FROM range(100)")
        source.expire()
        filled.database.connection.execute("CHECKPOINT")

    @pytest.mark.slow
    def test_a_copy_that_lost_its_hold_is_made_again(self, filled, tmp_path):
        source, begun = checkpoints(filled), []

        def disturb(step: str) -> None:
            if step == "begun":
                begun.append(step)
            if step == "begun" and len(begun) == 1:
                source.release()
                filled.database.connection.execute("CHECKPOINT")

        writer = BackupWriter(tmp_path / "copy", step=disturb)
        before = filled.rows(TOTALS)
        writer.write(source)
        filled.shut()
        writer.close()
        assert len(begun) == 2
        assert totals(tmp_path / "copy") == before

    @pytest.mark.slow
    def test_a_copy_that_never_succeeds_fails_with_the_reason(self, filled, tmp_path):
        source = checkpoints(filled)
        writer = BackupWriter(tmp_path / "copy", step=lambda step: source.release() if step == "begun" else None)
        with pytest.raises(Unreachable, match="begun 3 times"):
            writer.write(source)
        filled.shut()
        writer.close()
        assert not (tmp_path / "copy").exists()

    def test_ingest_waits_only_for_the_begin(self, filled):
        source, commits = checkpoints(filled), []

        def commit() -> None:
            with filled.database.transaction() as connection:
                connection.execute("UPDATE sender SET apart = 7")
            commits.append(1)

        moment = source.begin()
        thread = threading.Thread(target=commit)
        thread.start()
        thread.join(30)
        assert commits
        source.end(moment.id)


class TestContent:
    @pytest.mark.slow
    def test_it_has_history_state_offsets_and_checksums_and_no_secret(self, filled, tmp_path):
        path = "gpu/site=local/day=2026-05-28/10-0000.parquet"
        for folder, name in (("store.duckdb.history", path), ("store.duckdb.state", "7.state")):
            (filled.folder / folder / name).parent.mkdir(parents=True)
            (filled.folder / folder / name).write_bytes(b"x" * 100)
        with filled.database.transaction() as connection:
            SealedFile(path, "gpu", 0, "local", "2026-05-28", T0, T0 + SECOND, 1, 100).insert(connection)
            connection.execute("INSERT INTO snapshot VALUES ('judge', make_timestamptz(7), '7.state')")
        (filled.folder / "tokens").write_text("operator:not-for-a-backup\n")
        filled.shut()
        config = dataclasses.replace(
            config_of(filled.folder), api=sections.Api(port=1, token_file=filled.folder / "tokens")
        )
        [row] = run_backup(config, tmp_path / "copy", lambda _: None)
        found = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()}
        assert found == {"MANIFEST.json", "SHA256SUMS", "store.duckdb", "state/7.state", f"history/{path}"}
        assert (row["files"], row["partitions"]) == (1, 1)
        manifest = read_manifest(tmp_path / "copy")
        assert manifest["offsets"] == [["telemetry.v1", "n1", manifest["offsets"][0][2], 30]]
        assert not any(b"not-for-a-backup" in p.read_bytes() for p in (tmp_path / "copy").rglob("*") if p.is_file())
        sums = dict(line.split("  ")[::-1] for line in (tmp_path / "copy/SHA256SUMS").read_text().splitlines())
        assert sums["store.duckdb"] == hashlib.sha256((tmp_path / "copy/store.duckdb").read_bytes()).hexdigest()
        assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "copy").rglob("*.duckdb"))

    @pytest.mark.slow
    def test_sealed_files_share_their_space_on_the_same_disk(self, filled, tmp_path):
        path = filled.folder / "store.duckdb.history/gpu/a.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
        with filled.database.transaction() as connection:
            SealedFile("gpu/a.parquet", "gpu", 0, "local", "2026-05-28", T0, T0 + SECOND, 1, 100).insert(connection)
        filled.shut()
        run_backup(config_of(filled.folder), tmp_path / "copy", lambda _: None)
        assert (tmp_path / "copy/history/gpu/a.parquet").samefile(path)

    @pytest.mark.slow
    def test_without_space_it_is_refused_before_anything_is_copied(self, filled, tmp_path):
        filled.shut()
        with pytest.raises(Unreachable, match=r"needs \d+ MiB"):
            run_backup(config_of(filled.folder, free_bytes=1 << 60), tmp_path / "copy", lambda _: None)
        assert not (tmp_path / "copy").exists()

    @pytest.mark.slow
    def test_foreign_files_are_neither_kept_in_a_backup_nor_restored_from_it(self, filled, tmp_path):
        filled.shut()
        partial, target = tmp_path / "copy.partial", tmp_path / "copy"
        for name in ("mine", "history/gpu/b.parquet", "state/9.state"):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_text("x")
        run_backup(config_of(filled.folder), target, lambda _: None)
        assert {path.name for path in target.rglob("*") if path.is_file()} == {STORE, MANIFEST, SUMS}
        for folder in ("history", "state"):
            (target / folder).mkdir(exist_ok=True)
            (target / folder / "foreign").write_text("x")
        run_restore(config_of(tmp_path / "new"), target, False, lambda _: None)
        assert not list((tmp_path / "new").rglob("foreign"))

    def test_an_existing_target_is_never_changed(self, filled, tmp_path):
        (tmp_path / "copy").mkdir()
        filled.shut()
        with pytest.raises(UsageError, match="exists"):
            run_backup(config_of(filled.folder), tmp_path / "copy", lambda _: None)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from pipeline.commands import operation
from tests.pipeline.test_backup import config_of
verb, folder, other, at = sys.argv[1:]
def step(name):
    if name == at:
        os.kill(os.getpid(), signal.SIGKILL)
if verb == "backup":
    operation.run_backup(config_of(Path(folder)), Path(other), lambda _: None, step)
else:
    operation.run_restore(config_of(Path(folder)), Path(other), True, lambda _: None, step)
"""


def run_killed(verb: str, folder: Path, other: Path, at: str) -> None:
    words = [sys.executable, "-c", KILLED, verb, str(folder), str(other), at]
    assert subprocess.run(words, cwd=os.getcwd()).returncode == -signal.SIGKILL


class TestKilled:
    @pytest.mark.sample(every=3)
    @pytest.mark.parametrize("step", ["history", "begun", "store", "settled", "written", "named"])
    def test_a_backup_that_is_killed_at_a_step_is_completed_by_the_next_run(self, filled, tmp_path, step):
        path = filled.folder / "store.duckdb.history/gpu/a.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
        with filled.database.transaction() as connection:
            SealedFile("gpu/a.parquet", "gpu", 1, "local", "2026-05-28", T0, T0 + SECOND, 1, 100).insert(connection)
        before, target = filled.rows(TOTALS), tmp_path / "copy"
        filled.shut()
        run_killed("backup", filled.folder, target, step)
        assert target.exists() == (step == "named")
        if step != "named":
            with pytest.raises(UsageError, match="not completed"):
                read_manifest(target)
            run_backup(config_of(filled.folder), target, lambda _: None)
        assert find_damage(target) == []
        assert not target.with_name("copy.partial").exists()
        assert (target / "history/gpu/a.parquet").exists()
        assert totals(target) == before
        assert totals(filled.folder) == before

    @pytest.mark.sample(every=3)
    @pytest.mark.parametrize("step", ["marked", "aside", "copied", "named", "done"])
    def test_a_restore_that_is_killed_at_a_step_is_completed_by_the_next_run(self, filled, tmp_path, step):
        before, source = filled.rows(TOTALS), tmp_path / "copy"
        filled.shut()
        run_backup(config_of(filled.folder), source, lambda _: None)
        filled.send("n3", T0)
        filled.drain()
        after = filled.rows(TOTALS)
        filled.shut()
        run_killed("restore", filled.folder, source, step)
        if step != "done":
            with pytest.raises(UsageError, match="a restore was interrupted"):
                database.Database(filled.folder / "store.duckdb")
            other = shutil.copytree(source, tmp_path / "other")
            with pytest.raises(Refused, match="was interrupted"):
                run_restore(config_of(filled.folder), other, True, lambda _: None)
            run_restore(config_of(filled.folder), source, False, lambda _: None)
        assert totals(filled.folder) == before
        assert totals(filled.folder / "store.duckdb.replaced") == after


class TestRestore:
    @pytest.fixture
    def source(self, filled, tmp_path) -> Path:
        filled.shut()
        run_backup(config_of(filled.folder), tmp_path / "copy", lambda _: None)
        return tmp_path / "copy"

    @pytest.mark.slow
    def test_a_store_that_exists_is_refused_and_not_changed(self, filled, source):
        content = (filled.folder / "store.duckdb").read_bytes()
        with pytest.raises(Refused, match="--replace"):
            run_restore(config_of(filled.folder), source, False, lambda _: None)
        assert (filled.folder / "store.duckdb").read_bytes() == content

    @pytest.mark.slow
    def test_a_store_of_which_only_the_file_is_lost_is_restored_with_replace(self, filled, source):
        """As docs/disaster.md has it: state and history are still there."""
        (filled.folder / "store.duckdb.state").mkdir(exist_ok=True)
        (filled.folder / "store.duckdb.state" / "detectors").touch()
        (filled.folder / "store.duckdb").unlink()
        with pytest.raises(Refused, match="--replace"):
            run_restore(config_of(filled.folder), source, False, lambda _: None)
        run_restore(config_of(filled.folder), source, True, lambda _: None)
        assert (filled.folder / "store.duckdb").exists()
        guide = Path(__file__).parents[2] / "docs" / "disaster.md"
        assert "\n    fleetpulse restore --replace " in guide.read_text()

    @pytest.mark.slow
    def test_an_earlier_store_that_was_moved_aside_is_never_overwritten(self, filled, source):
        run_restore(config_of(filled.folder), source, True, lambda _: None)
        with pytest.raises(Refused, match="remove it first"):
            run_restore(config_of(filled.folder), source, True, lambda _: None)

    @pytest.mark.slow
    def test_a_damaged_file_is_named_and_nothing_is_restored(self, tmp_path, source):
        with open(source / "store.duckdb", "r+b") as file:
            file.seek(20_000)
            file.write(b"damage")
        with pytest.raises(DamagedStore, match=r"store\.duckdb: differs"):
            run_restore(config_of(tmp_path / "new"), source, False, lambda _: None)
        assert not (tmp_path / "new").exists()

    @pytest.mark.slow
    def test_a_backup_of_a_newer_version_is_refused(self, tmp_path, source):
        manifest = json.loads((source / "MANIFEST.json").read_text())
        (source / "MANIFEST.json").write_text(json.dumps({**manifest, "schema_version": 999}))
        with pytest.raises(UsageError, match="schema version 999"):
            run_restore(config_of(tmp_path / "new"), source, False, lambda _: None)

    @pytest.mark.slow
    def test_checksums_that_were_cut_off_are_named(self, tmp_path, source):
        """It said "**: Is a directory**"."""
        lines = (source / SUMS).read_text().splitlines()
        (source / SUMS).write_text("\n".join([*lines[:-1], lines[-1][:20]]))
        assert find_damage(source) == [
            f"{lines[-1].partition('  ')[2]}: not in {SUMS}",
            f"{SUMS}: line {len(lines)} is '{lines[-1][:20]}', "
            "expected a checksum, two spaces and a file of the backup",
        ]
        (source / SUMS).write_text(f"{'0' * 64}  ../tokens\n")
        assert "expected a checksum, two spaces and a file" in find_damage(source)[-1]

    def test_a_folder_that_is_no_backup_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="is no backup"):
            run_restore(config_of(tmp_path / "new"), tmp_path, False, lambda _: None)

    @pytest.mark.slow
    def test_a_store_that_a_pipeline_has_open_is_refused(self, filled, source):
        held = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.read()",
                str(filled.folder / "store.duckdb"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert held.stdout is not None
        held.stdout.readline()
        try:
            with pytest.raises(Unreachable, match="stop it first"):
                run_restore(config_of(filled.folder), source, True, lambda _: None)
        finally:
            held.communicate(b"")

    @pytest.mark.slow
    def test_spools_keep_what_the_lost_store_had_read(self, filled, source, tmp_path):
        """The cursors of the lost store name messages that the restored one does not have."""
        for second in range(300, 400, 10):
            filled.send("n1", T0 + second * SECOND, 10, second)
        ingest = filled.drain()
        before = filled.rows(TOTALS)
        filled.transport.close()
        assert list((filled.folder / "spool").rglob("*.cursor"))
        del ingest
        filled.shut()
        for path in filled.folder.glob("store.duckdb*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)
        told: list[str] = []
        run_restore(config_of(filled.folder), source, False, told.append)
        assert not list((filled.folder / "spool").rglob("*.cursor"))
        assert "Start the pipeline" in told[-1]
        filled.drain()
        assert filled.rows(TOTALS) == before
        assert filled.rows("SELECT * FROM gaps") == []
