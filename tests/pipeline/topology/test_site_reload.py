"""Topology files in a running pipeline: intervals in the store, reload, and the last good content after a bad file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.commands.site_reload import CHECK_SECONDS, SiteReload, list_settings
from pipeline.config.sections import Store
from pipeline.config.topology import TopologyFiles, TopologySource
from pipeline.ingest.entities import load_entities, load_topology
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.store.database import Database
from pipeline.store.events import write_events
from pipeline.store.retention import DAY, apply_bounds, drop_unnamed_entities
from pipeline.store.topology_lines import list_ancestors, list_descendants, read_lines
from pipeline.topology.own_files import read_csv
from pipeline.topology.site import READERS, find_faults
from tests.pipeline.topology.conftest import CONF
from tests.until import until

T0 = 1_800_000_000 * SECOND


class RunningSite:
    """A store with agents' inventories, topology files, and a clock that the test moves."""

    def __init__(self, folder: Path, *formats: str) -> None:
        self.folder, self.time, self.elapsed = folder, T0, 0.0
        self.database = Database(folder / "store.duckdb")
        sources = tuple(TopologySource(name, self.file(name)) for name in formats)  # type: ignore[arg-type]
        self.files = TopologyFiles(None, sources)

    def file(self, name: str) -> Path:
        return self.folder / f"site.{name}"

    def write(self, name: str, text: str) -> None:
        """Replaces a file as an export does: whole, with another inode."""
        fresh = self.folder / "fresh"
        fresh.write_text(text)
        fresh.replace(self.file(name))

    def report(self, **parents: tuple[str, ...]) -> list[Event]:
        lines = {
            f"node:{node}": {"parents": list(above), "attributes": {"agent": "1"}} for node, above in parents.items()
        }
        event = Event(self.time, "node:n1", "inventory", {"entities": lines})
        with self.database.transaction() as connection:
            write_events(connection, [EventBatch(Origin("local", "n1", b"e" * 16), (event,))])
        return [event]

    def start(self) -> None:
        """Reads everything as a new process does."""
        self.reload = SiteReload(self.files, self.database, lambda: self.time, lambda: self.elapsed)
        self.reload.start()
        stored = load_entities(self.database.connection, self.time)
        self.membership = Membership(load_topology(stored, self.reload.merged))

    def pass_time(self, seconds: int) -> None:
        """Lets time pass; the loop looks at the files and applies them."""
        self.time += seconds * SECOND
        self.elapsed += max(seconds, CHECK_SECONDS)
        self.reload.poll(self.membership)
        until(lambda: self.reload._thread is None or not self.reload._thread.is_alive())
        self.reload.poll(self.membership)

    def parents(self, entity: str, at: int | None = None) -> list[tuple[str, str]]:
        lines = read_lines(self.database.connection, [entity], self.time if at is None else at)
        return [(line.parent, line.source) for line in lines]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RunningSite]:
    made = RunningSite(tmp_path, "csv", "slurm")
    made.write("csv", "entity,parent\nnode:n1,rack:r1\nrack:r1,cdu:c1\n")
    made.write("slurm", CONF)
    yield made
    made.database.close()


def test_a_node_has_the_parents_of_all_sources_with_the_source_of_each(site: RunningSite) -> None:
    site.report(n1=("chassis:c7", "rack:agent"))
    site.start()
    expected = [("rack:r1", "csv"), ("leaf:l1", "slurm"), ("chassis:c7", "agents")]
    assert sorted(site.parents("node:n1")) == sorted(expected)
    assert site.membership.topology.parents["node:n1"] == ("rack:r1", "leaf:l1", "chassis:c7")
    assert set(list_ancestors(site.database.connection, "node:n1", T0)) == {
        *("rack:r1", "leaf:l1", "chassis:c7", "cdu:c1", "spine:s1")
    }
    assert list_descendants(site.database.connection, "cdu:c1", T0) == ["rack:r1", "node:n1"]


def test_a_changed_file_counts_without_a_restart_and_the_past_keeps_what_was(site: RunningSite) -> None:
    site.report(n1=("rack:agent",))
    site.start()
    site.write("csv", "entity,parent\nnode:n1,rack:r2\nrack:r2,cdu:c1\n")
    site.pass_time(3600)
    assert site.membership.topology.ancestors("node:n1")[0] == "rack:r2"
    assert ("rack:r2", "csv") in site.parents("node:n1")
    assert ("rack:r1", "csv") in site.parents("node:n1", T0 + SECOND)
    assert "rack:r1" not in site.membership.topology.parents
    site.write("csv", "entity,parent\nrack:r2,cdu:c1\n")
    site.pass_time(3600)
    assert site.membership.topology.parents["node:n1"] == ("leaf:l1", "rack:agent")
    assert ("rack:r2", "csv") in site.parents("node:n1", T0 + 3601 * SECOND)


def test_an_unchanged_file_is_not_read_again_and_begins_no_new_line(site: RunningSite) -> None:
    site.start()
    before = site.database.connection.execute("SELECT count(*), epoch_us(max(since)) FROM site_line").fetchall()
    site.pass_time(60)
    site.start()
    os.utime(site.file("csv"))
    site.pass_time(60)
    assert site.database.connection.execute("SELECT count(*), epoch_us(max(since)) FROM site_line").fetchall() == before


BAD = {
    "truncated": "entity,parent\nnode:n1,ra\nnode:n2",
    "empty": "",
    "swapped": CONF,
    "circle": "entity,parent\nrack:r1,rack:r1\n",
    "binary": "\x00\x01",
    "no device": "entity,parent\n",
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_file_changes_nothing_is_logged_counted_and_kept_through_a_restart(
    site: RunningSite, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.start()
    site.write("csv", BAD[how])
    with caplog.at_level(logging.ERROR):
        site.pass_time(60)
    assert ("rack:r1", "csv") in site.parents("node:n1")
    assert [r.message for r in caplog.records if "site.csv" in r.message and "expected" in r.message]
    assert site.reload.count()['fleetpulse_topology_source_refused{source="csv"}'] == 1
    site.start()
    assert site.membership.topology.parents["node:n1"] == ("rack:r1", "leaf:l1")
    assert ("rack:r1", "csv") in site.parents("node:n1")
    site.write("csv", "entity,parent\nnode:n1,rack:r5\n")
    site.pass_time(60)
    assert ("rack:r5", "csv") in site.parents("node:n1")
    assert site.reload.count()['fleetpulse_topology_source_refused{source="csv"}'] == 0


def fail(files: object, naming: object) -> NoReturn:
    raise KeyError("00000000000000aa")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_reader_that_fails_in_its_own_way_is_one_refused_source_and_stops_no_other_and_no_start(
    site: RunningSite, is_known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_known:
        site.start()
    monkeypatch.setitem(READERS, "csv", fail)  # the first source
    if is_known:
        site.write("csv", "entity,parent\nnode:n1,rack:r9\n")
        site.write("slurm", "SwitchName=l7 Nodes=n1\n")
        site.pass_time(60)
    else:
        site.start()
    kept = [("rack:r1", "csv")] if is_known else []
    assert site.parents("node:n1") == [*kept, ("leaf:l7" if is_known else "leaf:l1", "slurm")]
    count = site.reload.count()
    assert [count[f'fleetpulse_topology_{name}{{source="csv"}}'] for name in ("source_refused", "refusals_total")] == [
        1,
        1,
    ]
    message = (
        f"{site.file('csv')}: the reader of csv failed: KeyError: '00000000000000aa'; expected a file of this "
        "format; if it is one, this is a fault of Fleetpulse: report it with the file"
    )
    assert site.reload.site.faults == {"csv": message}
    refused = [record for record in caplog.records if "refused" in record.message]
    assert [message in record.message for record in refused] == [True]
    assert refused[0].exc_info is not None  # the line of the reader, for us
    site.pass_time(60)  # an unchanged file is not read again
    assert site.reload.count()['fleetpulse_topology_refusals_total{source="csv"}'] == 1
    site.start()
    assert ("rack:r1", "csv") in site.parents("node:n1") or not is_known
    monkeypatch.setitem(READERS, "csv", read_csv)
    site.write("csv", "entity,parent\nnode:n1,rack:r5\n")
    site.pass_time(60)
    assert ("rack:r5", "csv") in site.parents("node:n1")
    assert site.reload.count()['fleetpulse_topology_source_refused{source="csv"}'] == 0


def test_the_doctor_and_the_check_name_a_source_whose_reader_fails(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "csv", fail)
    good, faults = find_faults(list_settings(site.files))
    assert (list(good), list(faults)) == (["slurm"], ["csv"])
    assert faults["csv"].startswith(f"{site.file('csv')}: the reader of csv failed: KeyError")


def test_a_source_that_lost_most_of_its_entities_is_used_with_a_warning(
    site: RunningSite, caplog: pytest.LogCaptureFixture
) -> None:
    site.write("csv", "entity,parent\n" + "".join(f"node:n{i},rack:r1\n" for i in range(10)))
    site.start()
    site.write("csv", "entity,parent\nnode:n1,rack:r1\nnode:n2,rack:r1\n")
    site.pass_time(60)
    assert ("rack:r1", "csv") in site.parents("node:n1")
    assert site.parents("node:n9") == []
    assert "topology source csv: 2 of 10 entities are left; if they still exist, export it again" in caplog.messages


@pytest.mark.slow
def test_a_removed_file_changes_nothing_and_a_huge_or_strange_one_is_refused(site: RunningSite) -> None:
    site.start()
    site.file("csv").unlink()
    site.pass_time(60)
    assert ("rack:r1", "csv") in site.parents("node:n1")
    os.mkfifo(site.file("csv"))
    site.pass_time(60)
    assert "no regular file" in site.reload.site.faults["csv"]
    site.file("csv").unlink()
    with open(site.file("csv"), "wb") as file:
        file.truncate(300 << 20)
    site.pass_time(60)
    assert "too large" in site.reload.site.faults["csv"]
    assert ("rack:r1", "csv") in site.parents("node:n1")


def test_the_past_of_inventories_stays_when_they_change_or_end(site: RunningSite) -> None:
    site.report(n9=("rack:a",))
    site.time += 3600 * SECOND
    site.report(n9=("rack:b",))
    site.time += 3600 * SECOND
    site.report(n9=("rack:b",))
    assert site.parents("node:n9", T0 + 1) == [("rack:a", "agents")]
    assert site.parents("node:n9") == [("rack:b", "agents")]
    drop_unnamed_entities(site.database, DAY, site.time + 3 * DAY)
    assert site.parents("node:n9", T0 + 3601 * SECOND) == [("rack:b", "agents")]
    assert site.parents("node:n9", site.time + DAY) == []
    apply_bounds(site.database, Store(), site.time + 91 * DAY)
    assert site.parents("node:n9", T0 + 1) == []


def test_a_circle_with_the_inventory_refuses_the_line_and_nothing_else(site: RunningSite) -> None:
    site.report(n1=("rack:r1",))
    site.start()
    site.write("csv", "entity,parent\nrack:r1,node:n1\nnode:n2,rack:r1\n")
    site.pass_time(60)
    assert site.membership.topology.parents["node:n2"] == ("rack:r1", "leaf:l1")
    assert len(site.membership.topology.ancestors("node:n1")) >= 1


def test_a_start_with_a_bad_topology_file_and_an_empty_store_is_refused(tmp_path: Path) -> None:
    site = RunningSite(tmp_path)
    (tmp_path / "topology.toml").write_text("version = 2\n")
    site.files = TopologyFiles(tmp_path / "topology.toml")
    with pytest.raises(UsageError, match="version = 2"):
        site.start()
    site.database.close()


def test_two_sources_of_one_name_are_refused() -> None:
    twice = tuple(TopologySource("csv", Path(path)) for path in "ab")
    with pytest.raises(ConfigError, match="two are named 'csv'"):
        TopologyFiles(None, twice)
