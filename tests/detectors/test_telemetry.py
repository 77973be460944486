"""Silence and its causes: dead hosts, dead agents, shared feeds, hung GPUs; and cases that are not silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.telemetry import Telemetry
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology
from tests.examples import examples

START, RACKS, NODES, GPUS = 1_790_000_000 * SECOND, 2, 4, 4
NAMES = {
    "node": tuple(f"node:r{r}n{n}" for r in range(RACKS) for n in range(NODES)),
    "gpu": tuple(f"gpu:r{r}n{n}.{g}" for r in range(RACKS) for n in range(NODES) for g in range(GPUS)),
    "power": tuple(f"pdu:p{r}" for r in range(RACKS)),
    "rank": tuple(f"rank:j.{i}" for i in range(RACKS * NODES)),
}
FAULT = 40


def topology() -> Topology:
    parents = {f"rack:r{r}": [f"pdu:p{r}"] for r in range(RACKS)}
    parents |= {node: [f"rack:{node[5:7]}"] for node in NAMES["node"]}
    parents |= {gpu: [f"node:{gpu[4:8]}"] for gpu in NAMES["gpu"]}
    parents |= {rank: ["job:j", f"gpu:{node[5:]}.0"] for rank, node in zip(NAMES["rank"], NAMES["node"], strict=True)}
    return Topology(parents)


class Site:
    """Eight nodes in two racks, each on its own PDU; a job with a rank on the first GPU of each node."""

    def __init__(self) -> None:
        self.detector, self.topology, self.findings = Telemetry(), topology(), []

    def tick(self, tick, silent=(), dark=(), stepping=True, events=(), without=(), more=None, columns=()):
        """Shows an instant without samples of the entities in `silent` and of all below them."""
        gone = {e for names in NAMES.values() for e in names if {e, *self.topology.ancestors(e)} & set(silent)}
        values = {
            "node": {"node.load1": np.full(8, 20.0 + tick % 7)},
            "gpu": {"gpu.power": np.full(32, 600.0 + tick % 5)},
            "power": {
                "power.voltage": np.array([0.0 if p in dark else 415.0 for p in NAMES["power"]]),
                "power.draw": np.array([0.0 if p in dark else 3e4 for p in NAMES["power"]]),
            },
            "rank": {"rank.step": np.full(8, float(tick if stepping else min(tick, FAULT)))},
        }
        values["node"] |= dict(columns)
        frames = {}
        for name in [c for c in values if c not in without]:
            columns = {s: np.where([e in gone for e in NAMES[name]], np.nan, v) for s, v in values[name].items()}
            mine = tuple(e for e in events if class_of_entity(e.entity) == name)
            frames[name] = Frame(START + tick * 10 * SECOND, name, NAMES[name], columns, self.topology, mine)
        for event in (e for e in events if class_of_entity(e.entity) not in frames):
            name = class_of_entity(event.entity)
            frames[name] = Frame(START + tick * 10 * SECOND, name, (), {}, self.topology, (event,))
        self.findings += self.detector.observe({**frames, **(more or {})})

    def run(self, ticks=40, silent=(), dark=(), stepping=True, events=(), first=(), without=()):
        for tick in range(FAULT):
            self.tick(tick, events=first if tick == 0 else (), without=without)
        for tick in range(FAULT, FAULT + ticks):
            self.tick(tick, silent, dark, stepping, events if tick == FAULT else (), without)
        return self.reported()

    def reported(self):
        return {(f.entity, f.level) for f in self.findings}


def event(entity, kind, tick=FAULT, **data):
    return Event(START + tick * 10 * SECOND, entity, kind, data)


JOB = event(
    "job:j", "job_start", 0, ranks={f"rank:j.{i}": {"gpu": f"gpu:{n[5:]}.0"} for i, n in enumerate(NAMES["node"])}
)


@pytest.fixture
def site():
    return Site()


def test_a_silent_node_whose_job_still_makes_steps_has_a_dead_agent_and_is_a_ticket(site):
    assert site.run(200, silent=["node:r0n1"], first=[JOB]) == {("node:r0n1", "suspect"), ("node:r0n1", "ticket")}
    assert site.findings[0].summary == "Node r0n1: silent for 40 s: agent or network, job j still runs"
    assert site.findings[0].onset <= START + FAULT * 10 * SECOND


def test_a_node_that_falls_silent_as_its_job_ends_is_dead_and_pages(site):
    ended = event("job:j", "job_end", ranks=list(NAMES["rank"]))
    assert site.run(silent=["node:r0n1"], stepping=False, first=[JOB], events=[ended]) == {("node:r0n1", "page")}


def test_a_job_without_a_step_since_its_node_fell_silent_pages(site):
    site.run(60, silent=["node:r0n1"], stepping=False, first=[JOB])
    assert ("node:r0n1", "page") in site.reported()


def test_a_job_that_made_steps_and_ends_later_does_not_make_it_a_page(site):
    site.run(30, silent=["node:r0n1"], first=[JOB])
    for tick in range(FAULT + 30, FAULT + 60):
        late = [event("job:j", "job_end", tick, ranks=list(NAMES["rank"]))] if tick == FAULT + 30 else []
        site.tick(tick, ["node:r0n1"], stepping=False, events=late)
    assert site.reported() == {("node:r0n1", "suspect"), ("node:r0n1", "ticket")}


def test_a_machine_check_before_the_silence_means_that_the_host_is_dead(site):
    mce = event("node:r0n1", "kernel", severity="critical", **{"class": "cpu"}, text="mce: Machine Check")
    assert site.run(silent=["node:r0n1"], stepping=False, events=[mce]) == {("node:r0n1", "page")}


@pytest.mark.parametrize(("ended", "level"), [(None, "ticket"), (FAULT - 20, "ticket"), (FAULT - 3, "page")])
def test_a_fatal_error_of_a_host_pages_if_a_job_died_with_it(site, ended, level):
    mce = event("node:r0n1", "kernel", FAULT - 3, severity="critical", **{"class": "cpu"}, text="mce: Machine Check")
    for tick in range(FAULT + 20):
        at = [JOB] if tick == 0 and ended else [mce] if tick == FAULT - 3 else []
        over = [event("job:j", "job_end", tick, ranks=list(NAMES["rank"]))] if tick == ended else []
        if tick == (ended or 0):
            site.topology.remove_entities(NAMES["rank"])
        site.tick(tick, ["node:r0n1"] if tick >= FAULT else (), without=("rank",), events=[*at, *over])
    assert site.reported() == {("node:r0n1", level)}


@pytest.mark.parametrize(("nodes", "after"), [(1, 610.0), (8, 1810.0)])
def test_a_node_without_a_sign_of_life_pages_after_ten_minutes_if_no_other_node_of_its_job_reports(site, nodes, after):
    ranks = {rank: place for rank, place in JOB.data["ranks"].items() if nodes > 1 or place["gpu"] == "gpu:r0n1.0"}
    site.topology.remove_entities(NAMES["rank"])
    site.run(190, silent=["node:r0n1"], first=[event("job:j", "job_start", 0, ranks=ranks)], without=("rank",))
    assert site.reported() == {("node:r0n1", "suspect"), ("node:r0n1", "ticket"), ("node:r0n1", "page")}
    levels = {f.level: f.evidence["silent_s"] for f in reversed(site.findings)}
    assert levels == {"suspect": 40.0, "ticket": 60.0, "page": after}


def test_a_silent_node_whose_ranks_were_started_again_elsewhere_pages(site):
    first = event("job:j", "job_start", 0, ranks={"rank:j.1": {"gpu": "gpu:r0n1.0"}})
    site.topology.remove_entities([rank for rank in NAMES["rank"] if rank != "rank:j.1"])
    site.run(20, silent=["node:r0n1"], first=[first], without=("rank",))
    assert {f.level for f in site.findings} == {"suspect", "ticket"}
    site.topology = Topology({**site.topology.parents, "rank:j.1": ["job:j", "gpu:r1n3.0"]})
    again = event("job:j", "job_start", FAULT + 20, ranks={"rank:j.1": {"gpu": "gpu:r1n3.0"}})
    site.tick(FAULT + 20, ["node:r0n1"], events=[again], without=("rank",))
    assert site.findings[-1].level == "page"


@pytest.mark.slow
def test_a_node_without_a_job_is_a_ticket_once_no_reboot_takes_as_long_and_never_pages(site):
    site.topology.remove_entities(NAMES["rank"])
    assert site.run(300, silent=["node:r0n1"]) == {("node:r0n1", "suspect"), ("node:r0n1", "ticket")}
    assert min(f.evidence["silent_s"] for f in site.findings if f.level == "ticket") == 910.0


def test_all_nodes_of_a_pdu_without_voltage_are_one_page_on_it(site):
    assert site.run(silent=["rack:r0"], dark=["pdu:p0"]) == {("pdu:p0", "page")}
    assert site.findings[0].summary == "PDU p0: 4 nodes silent for 40 s: no power"


def test_all_nodes_of_a_rack_whose_jobs_still_run_are_one_ticket(site):
    site.run(silent=["rack:r0"], first=[JOB])
    assert site.reported() == {("rack:r0", "ticket")}


@pytest.fixture
def impatient(site):
    """A site whose nodes count as dead after ten minutes without a sign of life."""
    site.detector = Telemetry(dead_seconds=600.0)
    return site


def test_a_rack_without_a_sign_of_life_is_a_ticket_and_pages_when_a_node_would(impatient):
    impatient.topology.remove_entities(NAMES["rank"])
    impatient.run(80, silent=["rack:r0"])
    assert impatient.reported() == {("rack:r0", "ticket"), ("rack:r0", "page")}
    assert impatient.findings[0].evidence["silent_s"] < 100
    assert min(f.evidence["silent_s"] for f in impatient.findings if f.level == "page") == pytest.approx(610, abs=1)


@pytest.mark.slow
def test_a_rack_whose_job_still_runs_stays_a_ticket(impatient):
    assert impatient.run(300, silent=["rack:r0"], first=[JOB]) == {("rack:r0", "ticket")}


def silent_after_its_job(site, silent, restart=False, forget=()):
    """The rack falls silent, its job makes steps and ends five minutes later; then only `silent` stays silent."""
    site.run(30, silent=["rack:r0"], first=[JOB])
    if restart:
        kept, site.detector = site.detector.snapshot(), Telemetry(dead_seconds=600.0)
        kept["nodes"]["groups"] = {
            e: {k: v for k, v in g.items() if k not in forget} for e, g in kept["nodes"]["groups"].items()
        }
        site.detector.restore(kept)
    over = event("job:j", "job_end", FAULT + 30, ranks=list(NAMES["rank"]))
    site.topology.remove_entities(NAMES["rank"])
    for tick in range(FAULT + 30, FAULT + 500):
        site.tick(tick, silent, stepping=False, events=[over] if tick == FAULT + 30 else ())
    return site.reported()


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
def test_a_rack_whose_job_made_steps_and_ended_later_stays_a_ticket(impatient, restart):
    assert silent_after_its_job(impatient, ["rack:r0"], restart) == {("rack:r0", "ticket")}


@pytest.mark.slow
def test_the_rest_of_a_rack_whose_job_made_steps_stays_a_ticket(impatient):
    assert silent_after_its_job(impatient, ["node:r0n1"]) == {("rack:r0", "ticket"), ("node:r0n1", "ticket")}


@pytest.mark.slow
def test_a_snapshot_without_the_nodes_that_lived_is_read_as_if_none_were_known(impatient):
    reported = silent_after_its_job(impatient, ["rack:r0"], restart=True, forget=("lives",))
    assert reported == {("rack:r0", "ticket"), ("rack:r0", "page")}


def test_a_fleet_that_is_silent_as_a_whole_pages_once_after_five_minutes(site):
    assert site.run(60, silent=["rack:r0", "rack:r1"]) == {("site:all", "ticket"), ("site:all", "page")}


def test_a_silent_gpu_with_an_xid_pages_and_without_one_is_a_ticket(site):
    xid = event("gpu:r0n1.2", "xid", xid=119, name="GSP RPC timeout")
    assert site.run(silent=["gpu:r0n1.2"], events=[xid]) == {("gpu:r0n1.2", "page")}
    other = Site()
    assert other.run(silent=["gpu:r1n1.2"]) == {("gpu:r1n1.2", "ticket")}


def test_all_gpus_of_a_node_that_reports_are_one_finding_on_the_node(site):
    assert site.run(silent=[f"gpu:r0n1.{g}" for g in range(GPUS)]) == {("node:r0n1", "ticket")}


def test_a_lost_node_is_reported_at_the_fourth_instant_that_it_misses(site):
    site.run(4, silent=["node:r0n1"])
    assert [(f.entity, f.level) for f in site.findings] == [("node:r0n1", "suspect")]
    assert site.findings[0].time - site.findings[0].onset == 40 * SECOND


def test_a_node_that_reports_once_a_minute_is_neither_lost_nor_full_of_gaps(site):
    for tick in range(200):
        site.tick(tick, ["node:r0n1"] if tick % 6 else ())
    assert site.reported() == set()


def test_a_gap_of_30_seconds_is_not_reported(site):
    assert site.run(3, silent=["node:r0n1"]) == set()
    site.tick(FAULT + 5)
    assert site.reported() == set()


def test_announced_work_is_not_reported(site):
    work = event("node:r0n1", "maintenance_start", seconds=3600.0)
    assert site.run(200, silent=["node:r0n1"], events=[work]) == set()


def test_a_reboot_that_an_xid_required_is_a_suspect_first(site):
    xid = event("gpu:r0n1.2", "xid", xid=79, name="fallen off the bus")
    site.topology.remove_entities(NAMES["rank"])  # its job died with the GPU
    assert site.run(60, silent=["node:r0n1"], events=[xid]) == {("gpu:r0n1.2", "suspect")}  # into its incident


def test_ranks_that_end_are_not_reported(site):
    ended = event("job:j", "job_end", ranks=list(NAMES["rank"]))
    assert site.run(silent=list(NAMES["rank"]), first=[JOB], events=[ended]) == set()


def test_a_node_that_falls_silent_within_its_first_minutes_is_reported(site):
    for tick in range(20):
        site.tick(tick, silent=["node:r0n1"] if tick > 2 else (), stepping=False)
    assert ("node:r0n1", "suspect") in site.reported()


def test_devices_that_never_reported_or_only_a_few_times_are_not_missed(site):
    for tick in range(100):
        site.tick(tick, silent=["gpu:r0n1.2"] if tick > 10 else (), without=("power",))
    assert site.reported() == set()


def test_many_nodes_that_share_nothing_and_fall_silent_together_are_one_incident():
    """A fifth of the racks' nodes at the same moment, spread over all racks: one unknown cause."""
    racks, each = 20, 5
    names = tuple(f"node:r{r}n{n}" for r in range(racks) for n in range(each))
    fleet = Topology({name: [f"rack:{name[5:].split('n')[0]}"] for name in names})
    detector, found = Telemetry(), []
    for tick in range(40):
        silent = np.array([tick > 20 and name.endswith(("n0", "n1")) for name in names])
        columns = {"node.load1": np.where(silent, np.nan, 20.0 + tick % 7)}
        found += detector.observe({"node": Frame(START + tick * 10 * SECOND, "node", names, columns, fleet)})
    assert {(f.entity, f.evidence["silent"]) for f in found} == {("site:all", 40)}
    assert found[0].summary == "Whole site: 40 of 100 nodes silent for 40 s: cause unknown"


def test_a_pause_of_the_pipeline_is_not_silence(site):
    for tick in [*range(FAULT), *range(FAULT + 400, FAULT + 420)]:
        site.tick(tick)
    assert site.reported() == set()


def test_lost_messages_are_a_ticket_that_counts_them(site):
    gap = event("node:r0n1", "gap", topic="telemetry", epoch=1, first=10, next=52, cause="spool full")
    assert site.run(events=[gap]) == {("node:r0n1", "ticket")}
    assert "42 messages" in site.findings[0].summary


def test_a_node_that_is_back_ends_its_condition(site):
    site.run(20, silent=["node:r0n1"])
    for tick in range(FAULT + 20, FAULT + 60):
        site.tick(tick)
    reported = len(site.findings)
    for tick in range(FAULT + 60, FAULT + 80):
        site.tick(tick)
    assert len(site.findings) == reported
    assert site.detector.conditions == {}


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.sets(st.sampled_from(NAMES["node"])), st.booleans()), max_size=60))
def test_no_order_of_instants_fails_and_no_onset_is_later_than_its_finding(ticks):
    site = Site()
    for tick, silent, whole in ticks:
        site.tick(tick, silent=silent, without=("node",) if whole else ())
    assert all(f.onset <= f.time for f in site.findings)
    assert all(f.level != "page" or f.entity == "site:all" for f in site.findings) or ticks


def test_malformed_event_data_is_not_a_fact_about_a_host():
    topology, facts = Topology({}), HostFacts()
    odd = [
        Event(1, "gpu:a.0", "xid", {"xid": [79]}),
        Event(1, "node:a", "kernel", {"severity": "critical", "class": []}),
    ]
    facts.update({"gpu": Frame(1, "gpu", (), {}, topology, tuple(odd))}, 1)
    assert facts.last_fatal("gpu:a.0", 2) is None
    assert facts.last_fatal("node:a", 2) is None


@pytest.mark.slow
def test_jobs_whose_end_was_lost_are_dropped():
    topology, jobs = Topology({}), SilentJobs()
    for k in range(5_000):
        event = Event(k * SECOND, f"job:{k}", "job_start", {})
        jobs.update({"node": Frame(k * SECOND, "node", (), {}, topology, (event,))}, k * SECOND)
    kept = jobs.snapshot()["jobs"]
    assert len(kept) <= 4096
    assert "job:4999" in kept
    later = 40 * 24 * 3600 * SECOND
    jobs.update({"node": Frame(later, "node", (), {}, topology, ())}, later)
    assert jobs.snapshot()["jobs"] == {}


def gap(site, instants, gone=("node:r0n1",), agent=None, every=99, ticks=13):
    """Gaps of some instants; agent: whether agents report CPU time, as the "same" or a "new" one after a gap."""
    names = tuple(f"agent:{n[5:]}" for n in NAMES["node"])
    site.topology = Topology({**topology().parents, **{a: [f"node:{a[6:]}"] for a in names}})
    for tick in range(FAULT + ticks):
        inside = tick >= FAULT and (tick - FAULT) % every < instants
        cpu = np.full(len(names), 1e4 + tick)
        cpu[1] = np.nan if inside else 5.0 + tick if agent == "new" and tick >= FAULT else cpu[1]
        agents = Frame(START + tick * 10 * SECOND, "agent", names, {"agent.cpu_time": cpu}, site.topology, ())
        site.tick(tick, gone if inside else (), more={"agent": agents} if agent else None)
    return site.reported()


def test_a_gap_of_a_node_whose_agent_did_not_restart_is_a_ticket_once_it_reports_again(site):
    assert gap(site, 2, agent="same") == {("node:r0n1", "ticket")}
    first = site.findings[0]
    assert first.summary == "Node r0n1: gap of 30 s in all data, its agent did not restart"
    assert (first.onset, first.evidence["cause"]) == (START + (FAULT - 1) * 10 * SECOND, "hole")


def test_gaps_of_one_instant_of_one_class_or_of_many_nodes_together_are_not_reported():
    assert gap(Site(), 1) == set()
    assert gap(Site(), 4, [f"gpu:r0n1.{g}" for g in range(GPUS)]) == set()
    assert gap(Site(), 3, [f"node:r0n{n}" for n in range(3)]) == set()


@pytest.mark.parametrize("looks", [3, 4, 6, 7, 9])
def test_a_gap_and_a_silence_are_never_both_tickets(looks):
    site = Site()
    gap(site, looks, agent="same")
    assert {f.evidence["cause"] == "hole" for f in site.findings if f.level == "ticket"} == {looks < 6}


@pytest.mark.parametrize("job", [False, True])
@pytest.mark.parametrize(("booted", "level"), [(True, "suspect"), (False, "ticket")])
def test_an_idle_node_that_was_out_for_minutes_is_a_ticket_unless_it_rebooted(site, booted, level, job):
    site.topology.remove_entities(() if job else NAMES["rank"])
    for tick in range(FAULT + 60):
        out, since = FAULT <= tick < FAULT + 30, tick - FAULT - 30
        up = np.full(8, 1e6) if not booted or since < 0 else np.append(60.0 + 10 * since, np.full(7, 1e6))
        more = {"node.uptime": np.where(np.arange(8) == 0, np.nan if out else up, 1e6)}
        site.tick(tick, ["node:r0n0"] if out else (), columns=more)
    expected = "ticket" if job else level  # with a job it was a ticket after a minute
    assert max((f.level for f in site.findings), key=["suspect", "ticket", "page"].index) == expected
    assert ("it rebooted" in site.findings[-1].summary) == (booted and not job)


def test_a_gap_over_which_the_agent_restarted_or_did_not_report_is_a_suspect():
    for agent, words in (("new", "its agent restarted"), (None, "agent restarted or paused")):
        site = Site()
        assert gap(site, 3, agent=agent) == {("node:r0n1", "suspect")}
        assert words in site.findings[0].summary


def test_an_agent_that_restarts_again_and_again_is_a_ticket(site):
    assert gap(site, 2, agent="new", every=10, ticks=40) == {("node:r0n1", "suspect"), ("node:r0n1", "ticket")}


def test_announced_work_makes_no_gap(site):
    site.tick(0, events=[event("node:r0n1", "maintenance_start", 0, seconds=3600.0)])
    assert gap(site, 3) == set()
