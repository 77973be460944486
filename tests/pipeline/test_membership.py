"""Job starts and ends move the ranks of a topology, at their time and never against newer information."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.commands.site_reload import list_settings
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.engine.engine import Engine
from pipeline.incidents.desk import QUIET_PERIOD, Desk
from pipeline.ingest.entities import StoredEntities, load_topology
from pipeline.ingest.ingest import Committed
from pipeline.judging.frames import Framer
from pipeline.judging.presence import LastSeen
from pipeline.model.membership import REMEMBERED, Membership
from pipeline.model.records import SECOND, Event, Finding, Rows
from pipeline.model.topology import Topology
from pipeline.topology.merge import merge_sources
from pipeline.topology.site import read_source
from tests.pipeline.test_job_end import NOW, build_inventory, rank

PLACES = {f"gpu:n{n}.{i}": (f"node:n{n}",) for n in range(3) for i in range(2)}


def start(job: str, *gpus: str, time: int = NOW, stage: str = "0") -> Event:
    ranks = {f"rank:{job}.{i}": {"stage": f"stage:{job}.{stage}", "gpu": gpu} for i, gpu in enumerate(gpus)}
    return Event(time, f"job:{job}", "job_start", {"ranks": ranks})


def end(job: str, *ranks: str, time: int) -> Event:
    return Event(time, f"job:{job}", "job_end", {"ranks": list(ranks)} if ranks else {})


@pytest.fixture
def membership() -> Membership:
    return Membership(Topology(PLACES))


def test_a_start_places_ranks_in_stage_and_job_and_on_their_gpus(membership):
    assert membership.apply_events([start("81", "gpu:n0.0", "gpu:n1.0")]) == ()
    assert membership.topology.parents["rank:81.1"] == ("stage:81.0", "job:81", "gpu:n1.0")
    assert membership.topology.parents["stage:81.0"] == ("job:81",)
    assert membership.topology.ancestor_of_kind("rank:81.1", "node") == "node:n1"


def test_a_rank_that_starts_elsewhere_moves(membership):
    membership.apply_events([start("81", "gpu:n0.0"), start("81", "gpu:n2.1", time=NOW + SECOND, stage="3")])
    assert membership.topology.parents["rank:81.0"] == ("stage:81.3", "job:81", "gpu:n2.1")


def test_an_end_removes_the_ranks_with_their_empty_stages_and_job(membership):
    membership.apply_events([start("81", "gpu:n0.0", "gpu:n1.0"), start("82", "gpu:n2.0")])
    assert membership.apply_events([end("81", "rank:81.0", time=NOW + 1)]) == ("rank:81.0",)
    assert set(membership.apply_events([end("81", "rank:81.1", time=NOW + 2)])) == {"rank:81.1", "stage:81.0", "job:81"}
    assert membership.topology.descendants("job:82") == ("rank:82.0", "stage:82.0")
    assert not [entity for entity in membership.topology.parents if "81" in entity]


def test_an_end_without_ranks_ends_all_ranks_of_the_job(membership):
    membership.apply_events([start("81", "gpu:n0.0", "gpu:n1.0"), start("82", "gpu:n2.0")])
    membership.apply_events([end("81", time=NOW + 1)])
    assert [e for e in membership.topology.parents if e.startswith("rank:")] == ["rank:82.0"]


def test_an_end_before_a_new_start_of_the_rank_ends_nothing(membership):
    membership.apply_events([start("81", "gpu:n0.0", time=NOW + 5 * SECOND)])
    assert membership.apply_events([end("81", time=NOW)]) == ()
    assert "rank:81.0" in membership.topology.parents


@pytest.mark.parametrize("named", [(), ("rank:81.0",)])
def test_a_start_that_arrives_after_its_later_end_places_no_rank(membership, named):
    membership.apply_events([end("81", *named, time=NOW + 60 * SECOND)])
    membership.apply_events([start("81", "gpu:n0.0", time=NOW + 55 * SECOND)])
    assert membership.topology.parents == PLACES
    membership.apply_events([start("81", "gpu:n1.0", time=NOW + 60 * SECOND)])
    assert membership.topology.ancestor_of_kind("rank:81.0", "node") == "node:n1", (
        "a restart at the time of the end is kept"
    )


def test_an_older_end_that_arrives_late_does_not_replace_a_newer_one(membership):
    membership.apply_events([end("81", time=NOW + 60 * SECOND)])
    membership.apply_events([end("81", time=NOW + 20 * SECOND)])
    membership.apply_events([start("81", "gpu:n0.0", time=NOW + 55 * SECOND)])
    assert membership.topology.parents == PLACES


def test_ends_are_kept_for_a_while_and_then_use_no_memory(membership):
    for job in range(100):
        time = NOW + job * REMEMBERED // 10
        membership.apply_events([end(str(job), f"rank:{job}.0", time=time)])
    known = len(membership._ended_at)
    assert 10 <= known <= 11
    membership.apply_events([start("95", "gpu:n0.0", time=NOW + 94 * REMEMBERED // 10)])
    assert membership.topology.parents == PLACES


def test_a_start_does_not_change_a_later_inventory(membership):
    """As in live mode: the inventory applies when it arrives, the start when its frame is evaluated."""
    membership.apply_inventories([build_inventory("n1", rank("81", 0, "n1", "2"))])
    membership.apply_events([start("81", "gpu:n0.0", time=NOW - SECOND)])
    assert membership.topology.parents["rank:81.0"] == ("stage:81.2", "job:81", "gpu:n1.0")


def test_further_gpus_of_a_rank_stay_when_its_start_names_the_first(membership):
    lines = {"rank:81.0": ("job:81", "gpu:n1.0", "gpu:n1.1")}
    membership.apply_inventories([build_inventory("n1", lines)])
    membership.apply_events([start("81", "gpu:n1.0", time=NOW + 1)])
    assert membership.topology.parents["rank:81.0"] == ("stage:81.0", "job:81", "gpu:n1.0", "gpu:n1.1")


def test_a_rank_removed_by_an_end_is_not_kept_by_its_inventory(membership):
    membership.apply_inventories([build_inventory("n1", rank("81", 0, "n1", "2"))])
    assert set(membership.apply_events([end("81", time=NOW + 1)])) == {"rank:81.0", "stage:81.2", "job:81"}
    left_over = {"job:81": (), "stage:81.2": ("job:81",)}  # in an agent's inventory
    membership.apply_inventories([build_inventory("n1", left_over)])
    assert not [entity for entity in membership.topology.parents if "81" in entity]


@pytest.mark.parametrize(
    "data",
    [{}, {"ranks": 3}, {"ranks": {"rank:81.0": 5}}, {"ranks": {"gpu:n0.0": {"gpu": "gpu:n0.1"}}}],
)
def test_a_malformed_start_changes_nothing(membership, data):
    membership.apply_events([Event(NOW, "job:81", "job_start", data)])
    assert membership.topology.parents == PLACES


def test_a_start_that_makes_a_circle_is_refused_with_a_log_line(membership, caplog):
    membership.topology.merge({"job:81": ("rank:81.0",)})
    membership.apply_events([start("81", "gpu:n0.0")])
    assert "job_start of job:81 refused" in caplog.text


def test_ranks_change_at_the_time_of_their_event_and_never_before(membership):
    """Both frames close together; the first must still see the old place."""
    ranks = ["rank:81.0"]
    framer = Framer(10 * SECOND, membership.topology, lambda _: ranks)
    for tick in range(4):
        framer.add_rows(_row(NOW + tick * 10 * SECOND))
    framer.add_events([start("81", "gpu:n0.0"), start("81", "gpu:n1.0", time=NOW + 25 * SECOND)])
    nodes = [
        i.frames["rank"].topology.ancestor_of_kind("rank:81.0", "node")
        for i in map(membership.apply_instant, framer.advance(NOW + 60 * SECOND))
    ]
    assert nodes == ["node:n0", "node:n0", "node:n1", "node:n1"]


def test_an_incident_of_a_rank_resolves_after_its_job_ended(membership):
    """An ended rank sends nothing more, and that is not missing telemetry."""
    framer = Framer(10 * SECOND, membership.topology, lambda _: ["rank:81.0"])
    framer.add_rows(_row(NOW))
    framer.add_events([start("81", "gpu:n0.0"), end("81", time=NOW + 15 * SECOND)])
    seen, desk = LastSeen(), Desk(membership.topology)
    for instant in map(membership.apply_instant, framer.advance(NOW + 60 * SECOND)):
        seen.record_instant(instant)
        slow = Finding(NOW, NOW, "rank:81.0", "straggler", "page", 1.0, "slow")
        desk.observe(instant.time, [slow] if instant.time == NOW else [], seen.is_present)
    seen.now = NOW + 2 * QUIET_PERIOD
    desk.observe(seen.now, [], seen.is_present)
    assert [i.state for i in desk.incidents.values()] == ["resolved"]


def test_a_rank_that_reports_again_after_its_end_can_be_missed_again(membership):
    framer = Framer(10 * SECOND, membership.topology, lambda _: ["rank:81.0"])
    framer.add_events([start("81", "gpu:n0.0"), end("81", time=NOW + SECOND)])
    framer.add_rows(_row(NOW + 60 * SECOND))
    seen = LastSeen()
    for instant in map(membership.apply_instant, framer.advance(NOW + 120 * SECOND)):
        seen.record_instant(instant)
    assert seen.is_present("rank:81.0")
    seen.now = NOW + 600 * SECOND
    assert not seen.is_present("rank:81.0")


def _row(time: int) -> Rows:
    return Rows("rank", np.array([time]), np.array([0], np.int32), {"rank.compute_time": np.array([4.0], "<f4")})


class PlaceRecorder:
    """A judge that records the places of the ranks at each frame."""

    signals = None
    names = ()

    def listing(self):
        return []

    def calibration(self):
        return {}

    def calibration_rows(self, other=None):
        return []

    def __init__(self):
        self.seen = {}

    def judge_events(self, events, topology, again=False):
        return []

    def observe(self, frames):
        topology = next(iter(frames.values())).topology
        ranks = [e for e in topology.parents if e.startswith("rank:")]
        time = max(frame.time for frame in frames.values())
        self.seen[(time - NOW) // (10 * SECOND)] = {e: topology.ancestor_of_kind(e, "node") for e in ranks}
        return []

    def snapshot(self):
        return ()

    def restore(self, state):
        pass


def test_the_live_pipeline_follows_jobs_at_their_time_as_a_replay_does(site):
    ingest, judge = site.open(), PlaceRecorder()
    engine = Engine(
        site.database, ingest.devices, Topology(PLACES), judge, lambda changes, now: [], lambda: NOW * 2, 10 * SECOND
    )
    for tick in range(5):
        site.send("n1", NOW + tick * 10 * SECOND)
    events = [
        start("81", "gpu:n0.0"),
        start("81", "gpu:n1.0", time=NOW + 15 * SECOND),
        end("81", time=NOW + 35 * SECOND),
    ]
    engine.observe(Committed(events=events))
    while (committed := ingest.step()) is not None:
        engine.observe(committed)
    engine.advance(NOW + 60 * SECOND)
    first, second = {"rank:81.0": "node:n0"}, {"rank:81.0": "node:n1"}
    assert list(judge.seen.values()) == [first, second, second, {}, {}]


def test_no_inventory_replaces_a_line_of_the_topology_file(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text(
        'version = 1\n[rack]\nr0 = ["row:a"]\n[node]\nn0 = ["rack:r0"]\n'
        '[attributes]\n"rack:r0" = { location = "hall 1" }\n'
    )
    config = build_section(Config, {"topology": {"path": str(path)}}, "test")
    [setting] = list_settings(config.topology)
    topology = load_topology(StoredEntities(), merge_sources([("file", read_source(setting))]))
    lines = {
        "rack:r0": {"parents": ["row:evil"], "attributes": {"location": "moon"}},
        "node:n0": {"parents": ["rack:evil"], "attributes": {"sku": "hgx"}},
        "gpu:n0.0": {"parents": ["node:n0"]},
    }
    Membership(topology).apply_inventories([Event(NOW, "node:n9", "inventory", {"entities": lines})])
    assert topology.ancestors("gpu:n0.0") == ("node:n0", "rack:r0", "row:a")
    assert topology.attributes == {"rack:r0": {"location": "hall 1"}, "node:n0": {"sku": "hgx"}}
