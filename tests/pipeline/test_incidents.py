"""The Desk: the life of an incident, which depends only on the findings and their times."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.fleet import compute_blast_radius
from pipeline.incidents.desk import MAX_RESOLVED, QUIET_PERIOD, REFINE_WINDOW, REOPEN_WINDOW, Change, Desk
from pipeline.model.errors import Refused, UsageError
from pipeline.model.records import SECOND, Finding, Incident, Level
from pipeline.model.topology import Topology
from tests.examples import examples

START = 1_790_000_000 * SECOND
STEP = 10 * SECOND


def fleet(nodes: int = 8, gpus: int = 4) -> Topology:
    """Returns two racks on one loop and one PDU; port i of every node on leaf i; a job with one rank per GPU."""
    parents: dict[str, tuple[str, ...]] = {"rack:r0": ("pdu:p1", "cdu:c1"), "rack:r1": ("pdu:p1", "cdu:c1")}
    for n in range(nodes):
        parents[f"node:n{n}"] = (f"rack:r{n * 2 // nodes}",)
        for i in range(gpus):
            parents[f"gpu:n{n}.{i}"] = (f"node:n{n}",)
            parents[f"port:n{n}.mlx5_{i}"] = (f"node:n{n}", f"leaf:l{i}", f"rail:{i}")
            parents[f"rank:81.{n * gpus + i}"] = ("stage:81.0", "job:81", f"gpu:n{n}.{i}")
    return Topology(parents)


def found(entity: str, detector: str = "straggler", level: Level = "page", onset: int = START, **more: Any) -> Finding:
    evidence = more.pop("evidence", {})
    signals = more.pop("signals", (f"{detector}.signal",))
    return Finding(onset, onset, entity, detector, level, 9.0, f"{entity} is wrong", evidence, signals)


class Case:
    """A Desk with a clock that advances by ten seconds per step."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.desk = Desk(topology or fleet(), lambda entity: ":sim-" in entity)
        self.time = START
        self.changes: list[Change] = []
        self.silent: set[str] = set()

    def report_findings(self, *findings: Finding, seconds: int = 10) -> list[Change]:
        self.time += seconds * SECOND
        new = self.desk.observe(self.time, findings, lambda entity: entity not in self.silent)
        self.changes += new
        return new

    def wait(self, microseconds: int) -> list[Change]:
        return [c for _ in range(0, microseconds, STEP) for c in self.report_findings()]

    def only(self) -> Incident:
        (incident,) = [i for i in self.desk.incidents.values() if i.resolved is None]
        return incident

    def causes(self) -> set[str]:
        return {i.cause for i in self.desk.incidents.values() if i.resolved is None}


@pytest.fixture
def case() -> Case:
    return Case()


def change_kinds(changes: Sequence[Change]) -> list[str]:
    return [c.kind for c in changes]


def test_a_page_opens_an_incident_immediately_with_a_stable_id(case: Case) -> None:
    (opened,) = case.report_findings(found("gpu:n1.2", "sdc"))
    assert (opened.kind, opened.before, opened.actor) == ("opened", None, "fleetpulse")
    incident = opened.incident
    assert (incident.cause, incident.severity, incident.members) == ("gpu:n1.2", "page", ("gpu:n1.2",))
    assert incident.id == "inc-d9e3c02676dd"
    assert opened.finding_keys == (("sdc", "gpu:n1.2", START),)
    assert incident.opened == case.time
    assert incident.onset == START


@pytest.mark.parametrize(("level", "severity"), [("suspect", "watch"), ("ticket", "ticket"), ("page", "page")])
def test_the_level_of_a_finding_is_the_severity_of_its_incident(case: Case, level: Level, severity: str) -> None:
    case.report_findings(found("gpu:n1.2", "sdc", level))
    assert case.only().severity == severity


def test_a_repeated_finding_changes_nothing(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    assert case.report_findings(found("gpu:n1.2", "sdc")) == []


def test_a_rising_level_raises_the_severity_and_it_never_falls_again(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc", "suspect"))
    (raised,) = case.report_findings(found("gpu:n1.2", "sdc", "page"))
    assert raised.kind == "severity_raised"
    assert raised.before is not None
    assert (raised.before.severity, raised.incident.severity) == ("watch", "page")
    case.report_findings(found("gpu:n1.2", "sdc", "suspect"))
    assert case.only().severity == "page"


def test_two_suspects_of_different_detectors_on_one_node_become_a_ticket(case: Case) -> None:
    case.report_findings(found("rank:81.4", "straggler", "suspect"))
    case.report_findings(found("port:n1.mlx5_0", "link", "suspect"))
    incident = case.only()
    assert incident.severity == "ticket"
    assert set(incident.members) == {"rank:81.4", "port:n1.mlx5_0"}
    assert incident.cause == "port:n1.mlx5_0", "links cause slow ranks, slow ranks do not cause link faults"


def test_two_suspects_based_on_the_same_signal_do_not_corroborate_each_other(case: Case) -> None:
    case.report_findings(found("gpu:n1.0", "thermal", "suspect", signals=("gpu.temperature",)))
    case.report_findings(found("gpu:n1.0", "generic", "suspect", signals=("gpu.temperature",)))
    assert case.only().severity == "watch"


def test_two_suspects_of_one_detector_on_one_node_stay_two_watches(case: Case) -> None:
    case.report_findings(found("gpu:n1.0", "thermal", "suspect"), found("gpu:n1.1", "thermal", "suspect"))
    assert case.causes() == {"gpu:n1.0", "gpu:n1.1"}


def test_a_rank_maps_to_its_gpu(case: Case) -> None:
    case.report_findings(found("rank:81.5"))
    incident = case.only()
    assert (incident.cause, incident.entity, incident.members) == ("gpu:n1.1", "rank:81.5", ("rank:81.5",))
    case.report_findings(found("gpu:n1.1", "thermal"))
    assert case.only().members == ("rank:81.5", "gpu:n1.1")


def test_without_topology_an_entity_is_its_own_cause() -> None:
    case = Case(Topology())
    case.report_findings(found("rank:81.5"), found("gpu:a.1", "sdc"))
    assert case.causes() == {"rank:81.5", "gpu:a.1"}


@pytest.mark.parametrize(
    ("entities", "detector", "cause"),
    [
        (["gpu:n1.0", "gpu:n1.1", "gpu:n1.2"], "thermal", "node:n1"),
        (["rank:81.4", "rank:81.5", "rank:81.6"], "straggler", "node:n1"),
        (["node:n0", "node:n1", "node:n2"], "thermal", "rack:r0"),
        (["node:n0", "node:n1", "node:n4"], "coolant", "cdu:c1"),
        (["node:n0", "node:n1", "node:n4"], "power", "pdu:p1"),
        (["port:n0.mlx5_3", "port:n1.mlx5_3", "port:n5.mlx5_3"], "link", "leaf:l3"),
    ],
)
def test_three_children_with_the_same_trouble_make_their_parent_a_suspect(
    case: Case, entities: list[str], detector: str, cause: str
) -> None:
    case.report_findings(*(found(e, detector) for e in entities))
    incident = case.only()
    assert incident.cause == cause
    assert set(incident.members) == set(entities)
    assert change_kinds(case.changes) == ["opened"], "the three were never reported, so their end is not either"


def test_two_children_with_trouble_are_a_coincidence(case: Case) -> None:
    case.report_findings(found("node:n0", "thermal"), found("node:n1", "thermal"))
    assert case.causes() == {"node:n0", "node:n1"}


def test_a_small_share_of_many_children_is_a_coincidence() -> None:
    case = Case(fleet(nodes=40, gpus=1))
    case.report_findings(*(found(f"port:n{n}.mlx5_0", "link") for n in (0, 13, 31)))
    assert case.causes() == {f"port:n{n}.mlx5_0" for n in (0, 13, 31)}
    case.report_findings(*(found(f"port:n{n}.mlx5_0", "link") for n in range(8)))
    assert case.causes() == {"leaf:l0"}


def test_a_parent_explains_only_trouble_that_it_can_cause(case: Case) -> None:
    case.report_findings(*(found(f"port:n{n}.mlx5_{n}", "link") for n in range(3)))
    assert len(case.causes()) == 3, "different leaves and rails, and no rack or loop makes links fail"
    case.report_findings(found("cdu:c1", "coolant"), found("gpu:n7.0", "sdc"))
    assert {"cdu:c1", "gpu:n7.0"} <= case.causes(), "coolant does not cause wrong results"


def test_a_cause_takes_in_the_findings_below_that_it_explains(case: Case) -> None:
    case.report_findings(found("rank:81.0"), found("node:n4", "thermal"))
    new = case.report_findings(found("cdu:c1", "coolant"), seconds=30)
    incident = case.only()
    assert incident.cause == "cdu:c1"
    assert set(incident.members) == {"cdu:c1", "rank:81.0", "node:n4"}
    assert sorted(change_kinds(new)) == ["cause_changed", "resolved"]
    folded = next(c for c in new if c.kind == "resolved")
    assert (folded.folded_into, folded.comment) == (incident.id, f"merged into {incident.id}")
    case.report_findings(found("rank:81.9"), seconds=300)
    assert case.causes() == {"cdu:c1"}, "a finding below an open incident joins it"


def test_a_suspect_above_does_not_hide_a_page_below(case: Case) -> None:
    case.report_findings(found("gpu:n1.0", "memory", "page"), found("node:n1", "power", "suspect"))
    assert case.causes() == {"gpu:n1.0", "node:n1"}


def test_slow_ranks_join_the_bad_link_of_their_node(case: Case) -> None:
    case.report_findings(found("port:n2.mlx5_1", "link"))
    case.report_findings(found("rank:81.9"))
    assert case.only().cause == "port:n2.mlx5_1"


def test_the_id_stays_while_the_cause_is_refined(case: Case) -> None:
    (opened,) = case.report_findings(found("node:n0", "coolant"))
    case.report_findings(found("node:n1", "coolant"))
    new = case.report_findings(found("node:n2", "coolant"))
    changed = next(c for c in new if c.kind == "cause_changed")
    assert changed.incident.id == opened.incident.id == case.only().id
    assert changed.incident.cause == "rack:r0"
    assert changed.before is not None
    assert changed.before.cause == "node:n0"


def test_the_cause_of_a_page_is_fixed_after_two_minutes(case: Case) -> None:
    case.report_findings(found("node:n0", "coolant"), found("node:n1", "coolant"))
    case.wait(REFINE_WINDOW)
    case.report_findings(found("node:n2", "coolant"))
    assert case.causes() == {"node:n0", "node:n1", "node:n2"}


def test_a_shared_cause_takes_in_symptoms_as_long_as_it_is_found(case: Case) -> None:
    """One more GPU becomes hot and slow, hours after a pump stopped."""
    case.report_findings(found("cdu:c1", "coolant"))
    for _ in range(100):
        case.report_findings(found("cdu:c1", "coolant"), seconds=60)
    case.report_findings(found("rank:81.3"), found("cdu:c1", "coolant"))
    assert case.causes() == {"cdu:c1"}


def test_a_long_open_shared_ticket_takes_in_nothing_new_but_findings_that_name_it(case: Case) -> None:
    case.report_findings(found("cdu:c1", "coolant", level="ticket"))
    for _ in range(35):
        case.report_findings(found("cdu:c1", "coolant", level="ticket"), seconds=60)
    case.report_findings(found("rank:81.3"), found("cdu:c1", "coolant", level="ticket"))
    assert case.causes() == {"cdu:c1", "gpu:n0.3"}


def test_broken_sensors_make_nothing_shared_a_suspect(case: Case) -> None:
    case.report_findings(*(found(f"gpu:n{n}.0", "telemetry_sensor", level="ticket") for n in range(4)))
    assert case.causes() == {f"gpu:n{n}.0" for n in range(4)}


def test_a_shared_cause_that_recurs_takes_in_new_findings_below_it(case: Case) -> None:
    case.report_findings(found("cdu:c1", "coolant"))
    for _ in range(35):
        case.report_findings(found("cdu:c1", "coolant"), seconds=60)
    case.report_findings(found("cdu:c1", "coolant", onset=case.time))
    case.report_findings(found("rank:81.3"))
    assert case.causes() == {"cdu:c1"}


def test_the_earliest_onset_decides_a_tie() -> None:
    """Two links of one node are open; a slow rank there joins the one that failed first."""
    case = Case()
    case.report_findings(found("port:n2.mlx5_1", "link", onset=START - 5), found("port:n2.mlx5_0", "link"))
    case.report_findings(found("rank:81.9"))
    slow = next(i for i in case.desk.incidents.values() if "rank:81.9" in i.members)
    assert slow.cause == "port:n2.mlx5_1"


def test_ten_quiet_minutes_resolve_an_incident(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    assert case.wait(QUIET_PERIOD - STEP) == []
    (resolved,) = case.report_findings()
    assert (resolved.kind, resolved.incident.state, resolved.incident.resolved) == ("resolved", "resolved", case.time)


def test_missing_telemetry_of_a_member_is_not_quiet(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    case.silent = {"gpu:n1.2"}
    assert case.wait(3 * QUIET_PERIOD) == []
    case.silent = set()
    assert case.wait(QUIET_PERIOD - STEP) == [], "the quiet period begins when telemetry is back"
    assert change_kinds(case.report_findings()) == ["resolved"]


def test_a_rank_whose_job_ended_does_not_hold_its_incident_open(case: Case) -> None:
    case.report_findings(found("rank:81.5"))
    case.silent = {"rank:81.5"}
    assert change_kinds(case.wait(QUIET_PERIOD)) == ["resolved"]


def test_a_condition_that_holds_and_moved_to_another_incident_does_not_hold_the_first() -> None:
    case, gpus = Case(fleet(gpus=8)), [f"gpu:n1.{g}" for g in range(6)]

    def report(entity: str, detector: str = "xid", **evidence: bool) -> Finding:
        return found(entity, detector, onset=START if case.time == START else case.time, evidence=evidence)

    case.report_findings(*(report(gpu, holds=True) for gpu in gpus))
    assert case.causes() == {"node:n1"}
    case.wait(40 * 60 * SECOND)
    case.report_findings(report(gpus[0], "thermal"))
    case.report_findings(report(gpus[0], holds=True))
    assert case.causes() == {"node:n1", gpus[0]}
    case.report_findings(*(report(gpu, cleared=True) for gpu in gpus))
    case.wait(15 * 60 * SECOND)
    assert case.causes() == set()


def test_a_condition_that_holds_ends_only_after_it_is_cleared_and_quiet(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc", evidence={"holds": True}))
    assert case.wait(3 * QUIET_PERIOD) == []
    assert change_kinds(case.report_findings(found("gpu:n1.2", "sdc", evidence={"cleared": True}))) == ["updated"]
    assert case.wait(QUIET_PERIOD - STEP) == []
    assert change_kinds(case.report_findings()) == ["resolved"]


def test_a_cleared_finding_opens_nothing(case: Case) -> None:
    assert case.report_findings(found("gpu:n1.2", "sdc", evidence={"cleared": True})) == []


def test_a_condition_that_recurs_soon_reopens_its_incident(case: Case) -> None:
    case.report_findings(found("port:n1.mlx5_0", "link"))
    case.wait(QUIET_PERIOD)
    (reopened,) = case.report_findings(found("port:n1.mlx5_0", "link", onset=case.time))
    assert reopened.kind == "reopened"
    assert reopened.incident.state == "open"
    assert reopened.incident.resolved is None
    assert len(case.desk.incidents) == 1


def test_new_trouble_of_a_member_does_not_reopen_the_cause_of_its_previous_trouble(case: Case) -> None:
    case.report_findings(found("cdu:c1", "coolant"), found("rank:81.5"))
    case.wait(QUIET_PERIOD)
    (opened,) = case.report_findings(found("rank:81.5", onset=case.time))
    assert (opened.kind, opened.incident.cause) == ("opened", "gpu:n1.1")


def test_the_title_is_the_newest_summary_of_the_main_finding(case: Case) -> None:
    case.report_findings(found("cdu:c1", "coolant"))
    weak = dataclasses.replace(found("cdu:c1", "coolant"), score=0.1, summary="flow 250 L/min", level="page")
    case.report_findings(weak, found("rank:81.5"))
    assert case.only().summary == "flow 250 L/min"
    (change,) = case.report_findings(dataclasses.replace(weak, summary="flow 260 L/min"))
    assert (change.kind, change.incident.summary) == ("retitled", "flow 260 L/min")
    assert case.report_findings(dataclasses.replace(weak, summary="flow 260 L/min")) == []


def test_a_title_has_at_most_80_characters(case: Case) -> None:
    case.report_findings(dataclasses.replace(found("cdu:c1", "coolant"), summary="flow " * 30))
    title = case.only().summary
    assert len(title) <= 80
    assert title.endswith("flow…")


def test_a_condition_that_recurs_late_is_a_new_incident(case: Case) -> None:
    case.report_findings(found("port:n1.mlx5_0", "link"))
    first = case.only().id
    case.wait(QUIET_PERIOD + REOPEN_WINDOW + 2 * STEP)
    assert case.desk.incidents == {}, "long resolved incidents are only in the store"
    (opened,) = case.report_findings(found("port:n1.mlx5_0", "link", onset=case.time))
    assert opened.kind == "opened"
    assert opened.incident.id != first


def test_acknowledged_is_not_resolved(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    change = case.desk.acknowledge(case.only().id, "ada", "mine", case.time)
    assert (change.kind, change.actor, change.comment) == ("acknowledged", "ada", "mine")
    assert case.only().state == "acknowledged"
    case.report_findings(found("gpu:n1.2", "sdc", onset=START + 1))
    assert case.only().state == "acknowledged"
    assert case.wait(QUIET_PERIOD)[0].incident.state == "resolved", "resolved replaces acknowledged"


def test_a_resolved_incident_cannot_be_acknowledged_nor_resolved_again(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    id_ = case.only().id
    case.desk.resolve(id_, "ada", "swapped", case.time)
    for verb in (case.desk.acknowledge, case.desk.resolve):
        with pytest.raises(Refused, match="already resolved"):
            verb(id_, "ada", "", case.time)
    assert case.desk.comment(id_, "ada", "still wondering", case.time).kind == "commented"


def test_an_unknown_incident_is_a_clear_error(case: Case) -> None:
    with pytest.raises(UsageError, match=r"^incident inc-0: no such incident is open or recently resolved") as error:
        case.desk.comment("inc-0", "ada", "hm", case.time)
    assert isinstance(error.value, KeyError)


def test_a_manual_resolve_mutes_the_incident_until_it_was_quiet_once(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    case.desk.resolve(case.only().id, "ada", "known", case.time)
    for _ in range(20):
        assert case.report_findings(found("gpu:n1.2", "sdc"), seconds=60) == []
    assert change_kinds(case.report_findings(found("gpu:n1.2", "memory", onset=case.time))) == ["opened"], (
        "another detector still reports"
    )
    case.wait(QUIET_PERIOD + STEP)
    assert change_kinds(case.report_findings(found("gpu:n1.2", "sdc", onset=case.time))) == ["opened"]


def test_findings_below_a_resolved_cause_are_reported_once_the_cause_was_quiet(case: Case) -> None:
    """One bad member must not mute its node or leaf permanently, for itself or for the other members."""
    case.report_findings(found("node:n1"))
    case.desk.resolve(case.only().id, "ada", "ended the daemon", case.time)
    began = case.time
    changes = [
        c for _ in range(0, QUIET_PERIOD + STEP, STEP) for c in case.report_findings(found("rank:81.7", onset=began))
    ]
    assert [(c.kind, c.incident.cause, c.incident.onset) for c in changes] == [("opened", "gpu:n1.3", began)]
    also = case.report_findings(found("rank:81.7", onset=began), found("gpu:n1.0", onset=case.time))
    assert [(c.kind, c.incident.cause) for c in also] == [("opened", "gpu:n1.0")]


def test_a_member_resolved_with_its_cause_stays_muted_while_its_condition_lasts(case: Case) -> None:
    ports = [f"port:n{n}.mlx5_2" for n in range(4)]
    case.report_findings(*(found(port, "link") for port in ports))
    assert case.only().cause == "leaf:l2"
    case.desk.resolve(case.only().id, "ada", "the leaf is being swapped", case.time)
    for _ in range(20):
        assert case.report_findings(found(ports[0], "link"), seconds=60) == []
    (change,) = case.report_findings(found(ports[0], "link"), found("port:n6.mlx5_2", "link", onset=case.time))
    assert (change.kind, change.incident.cause) == ("opened", "port:n6.mlx5_2")


def test_a_manual_resolve_does_not_mute_a_higher_severity(case: Case) -> None:
    """A page that follows a resolved suspect is new; a page that was resolved is known."""
    case.report_findings(found("gpu:n1.2", "xid", "suspect"))
    case.desk.resolve(case.only().id, "ada", "an application", case.time)
    case.desk.restore(case.desk.snapshot())
    assert case.report_findings(found("gpu:n1.2", "xid", "suspect", onset=case.time)) == []
    (change,) = case.report_findings(found("gpu:n1.2", "xid", "page", onset=case.time))
    assert (change.incident.state, change.incident.severity) == ("open", "page")
    case.desk.resolve(case.only().id, "ada", "swapped", case.time)
    for level in ("suspect", "page"):
        assert case.report_findings(found("gpu:n1.2", "xid", level, onset=case.time)) == []  # type: ignore[arg-type]


def test_a_mute_in_a_snapshot_without_levels_mutes_every_level_as_before(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "xid", "suspect"))
    case.desk.resolve(case.only().id, "ada", "an application", case.time)
    state = json.loads(case.desk.snapshot())
    state["mutes"] = [row[:3] for row in state["mutes"]]
    case.desk.restore(json.dumps(state))
    assert case.report_findings(found("gpu:n1.2", "xid", "page", onset=case.time)) == []


def test_a_resolved_condition_that_never_clears_is_reported_again_after_thirty_days() -> None:
    case = Case()
    case.report_findings(found("gpu:n1.2", "sdc"), found("gpu:n3.2", "sdc"))
    for incident in list(case.desk.incidents.values()):
        case.desk.resolve(incident.id, "ada", "known", case.time)
    case.silent = {"gpu:n3.2"}  # taken out of the fleet
    for hour in range(30 * 24 + 1):
        found_again = case.report_findings(found("gpu:n1.2", "sdc"), seconds=3600)
        assert bool(found_again) == (hour == 30 * 24)
    assert case.desk.as_json()["mutes"] == []


def test_a_mute_does_not_affect_another_open_incident(case: Case) -> None:
    case.report_findings(found("node:n0", "thermal"))
    case.wait(REFINE_WINDOW)
    case.report_findings(*(found(e, "thermal", onset=case.time) for e in ("node:n1", "node:n2", "node:n3")))
    rack = next(i for i in case.desk.incidents.values() if i.cause == "rack:r0")
    case.desk.resolve(rack.id, "ada", "known", case.time)
    for _ in range(20):
        case.report_findings(found("node:n0", "thermal"), seconds=60)
    assert case.only().cause == "node:n0"


def test_a_restart_continues_as_if_it_had_not_happened() -> None:
    script = story(random.Random(5))
    straight, torn = Case(), Case()
    for findings in script:
        torn.desk.restore((before := torn.desk).snapshot())
        fresh = Desk(before.topology, lambda entity: ":sim-" in entity)
        fresh.restore(before.snapshot())
        torn.desk = fresh
        assert torn.report_findings(*findings) == straight.report_findings(*findings)
    assert json.loads(torn.desk.snapshot()) == json.loads(straight.desk.snapshot())


def test_a_frame_that_was_already_seen_changes_nothing(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "sdc"))
    assert case.desk.observe(case.time - STEP, [found("gpu:n2.2", "sdc")]) == []


@pytest.mark.slow
def test_memory_for_resolved_incidents_is_bounded() -> None:
    case = Case(Topology())
    case.report_findings(*(found(f"gpu:n{n}.0", "sdc", "suspect") for n in range(MAX_RESOLVED + 50)))
    case.wait(QUIET_PERIOD)
    case.report_findings()
    assert len(case.desk.incidents) == MAX_RESOLVED


def test_simulated_trouble_is_marked_as_simulated() -> None:
    case = Case(Topology({"gpu:sim-n1.0": ("node:sim-n1",)}))
    case.report_findings(found("gpu:sim-n1.0", "sdc"), found("gpu:n1.0", "sdc"))
    assert {i.cause: i.simulated for i in case.desk.incidents.values()} == {"gpu:sim-n1.0": True, "gpu:n1.0": False}


def test_the_blast_radius_counts_the_entities_below_and_the_jobs_there(case: Case) -> None:
    case.report_findings(found("node:n1", "power"))
    blast = compute_blast_radius(case.only().cause, case.only().members, case.desk.topology)
    assert blast.entities == {"gpu": 4, "node": 1, "port": 4, "rank": 4}
    assert blast.jobs == ("job:81",)


def test_parts_of_a_node_that_run_no_work_count_only_when_they_are_in_trouble() -> None:
    links = {f"nvlink:n1.0.{i}": ("gpu:n1.0", "node:n1") for i in range(18)}
    topology = Topology({"gpu:n1.0": ("node:n1",), "disk:n1.nvme0": ("node:n1",), **links})
    assert compute_blast_radius("node:n1", ["gpu:n1.0"], topology).entities == {"gpu": 1, "node": 1}
    assert compute_blast_radius("gpu:n1.0", ["nvlink:n1.0.3"], topology).entities == {"gpu": 1, "nvlink": 1}


def test_components_of_a_node_do_not_change_the_suspects() -> None:
    """Links, disks and services below the nodes are merged into the topology before and after their parents."""
    plain = fleet()
    nodes = [entity for entity in plain.parents if entity.startswith("node:")]
    parts = {f"disk:{n[5:]}.{i}": [n] for n in nodes for i in range(9)}
    parts |= {f"sensor:{n[5:]}.{i}": plain.parents[n] for n in nodes for i in range(9)}
    for parents in ({**parts, **plain.parents}, {**plain.parents, **parts}):
        one, other = Case(plain), Case(Topology(parents))
        for script in story(random.Random(5)):
            one.report_findings(*script)
            other.report_findings(*script)
        assert one.desk.snapshot() == other.desk.snapshot()


DETECTORS = ("coolant", "link", "power", "sdc", "straggler", "thermal")


def story(dice: random.Random, instants: int = 60) -> list[list[Finding]]:
    """Returns random trouble over the whole fleet: bursts, repeats, quiet, cleared findings."""
    entities = sorted(fleet().parents)
    conditions = [
        found(dice.choice(entities), dice.choice(DETECTORS), dice.choice(("suspect", "ticket", "page")), START + i)
        for i in range(25)
    ]
    script = []
    for _ in range(instants):
        some = dice.sample(conditions, dice.randrange(6))
        if dice.random() < 0.1:
            some += [found(e, "coolant", "page") for e in entities if e.startswith("node:")]
        script.append(some)
    return script


def check_desk(desk: Desk) -> None:
    causes = [i.cause for i in desk.incidents.values() if i.resolved is None]
    assert len(causes) == len(set(causes)), "two open incidents for one cause"


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 32))
def test_one_cause_never_has_two_open_incidents_and_the_order_within_a_frame_does_not_matter(seed: int) -> None:
    dice = random.Random(seed)
    script = story(dice)
    one, other = Case(), Case()
    for findings in script:
        pause = dice.choice((10, 10, 60, 700, 2000))
        shuffled = dice.sample(findings, len(findings))
        assert one.report_findings(*findings, seconds=pause) == other.report_findings(*shuffled, seconds=pause)
        check_desk(one.desk)
        if dice.random() < 0.1 and (open_ := [i for i in one.desk.incidents.values() if i.resolved is None]):
            for desk in (one.desk, other.desk):
                desk.resolve(open_[0].id, "ada", "", one.time)
    assert one.desk.snapshot() == other.desk.snapshot()


def test_the_history_of_an_incident_has_no_gap() -> None:
    """Each change of the Desk begins where the previous one ended."""
    case = Case()
    last: dict[str, Incident] = {}
    for findings in story(random.Random(11), 200):
        for change in case.report_findings(*findings, seconds=60):
            known = last.get(change.incident.id)
            assert (change.before is None) == (change.kind == "opened")
            if known is not None and change.before is not None:
                assert (change.before.state, change.before.cause) == (known.state, known.cause)
                assert change.before.severity == known.severity
            last[change.incident.id] = change.incident


@pytest.mark.parametrize("collapsed_first", [False, True])
def test_a_leak_that_holds_stays_in_the_summary_until_it_is_dry(collapsed_first: bool) -> None:
    case = Case(Topology({"leak_detector:c1.tray": ("cdu:c1",), "rack:r0": ("cdu:c1",)}))
    leak = found("leak_detector:c1.tray", "coolant_leak", onset=START + 5 * SECOND, evidence={"holds": True})
    flow = found("cdu:c1", "coolant_edge", onset=START + 25 * SECOND - 25 * SECOND * collapsed_first)
    for finding in (flow, leak) if collapsed_first else (leak, flow):
        case.report_findings(finding)
    (incident,) = [i for i in case.desk.incidents.values() if i.resolved is None]
    assert incident.cause == "cdu:c1"
    assert "cdu:c1 is wrong" in incident.summary
    assert "leak_detector:c1.tray is wrong" in incident.summary
    cleared = dataclasses.replace(leak, evidence={"cleared": True})
    (change,) = case.report_findings(cleared)
    assert "leak_detector:c1.tray is wrong" not in change.incident.summary


def test_the_title_of_a_cause_that_no_finding_names_says_it_and_how_many_members_it_has() -> None:
    parents = {f"node:n{n}": (f"rack:r{n // 8}",) for n in range(32)}
    case = Case(Topology(parents))
    silent = [
        dataclasses.replace(found(f"node:n{n}", "telemetry"), summary=f"Node n{n}: silent for 3 min") for n in range(8)
    ]
    case.report_findings(silent[0])
    assert case.only().summary == "Node n0: silent for 3 min"
    case.report_findings(*silent[:7])
    assert (case.only().cause, case.only().summary) == ("rack:r0", "Rack r0: 7 nodes: silent for 3 min")
    later = [dataclasses.replace(one, summary=one.summary.replace("3", "4")) for one in silent]
    (change,) = case.report_findings(*later[:7])
    assert (change.kind, change.incident.summary) == ("retitled", "Rack r0: 7 nodes: silent for 4 min")
    case.report_findings(*later)
    assert case.only().summary == "Rack r0: 8 nodes: silent for 4 min"
    restored = Case(Topology(parents))
    restored.desk.restore(case.desk.snapshot())
    restored.time = case.time
    restored.report_findings(*silent)
    assert restored.only().summary == "Rack r0: 8 nodes: silent for 3 min"
