"""XIDs and other logged faults: their level, the entity that is blamed, and the end of a condition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collectors.gpu.xid_table import shipped_xid_table
from detectors.xid import levels as xid_levels
from detectors.xid.xid import Xid
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology
from tests.examples import examples

T0 = 1_790_000_000 * SECOND
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(2) for i in range(4))
NODES = ("node:n0", "node:n1")
GPU = "gpu:n0.1"
RESET = {"detail": {"to": 1}, "action": "reset GPU"}


def topology(job=True):
    ranks = {f"rank:7.{k}": ["job:7", gpu] for k, gpu in enumerate(GPUS)} if job else {}
    return Topology({**{gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}, **ranks})


class Site:
    """Feeds a detector instants of 10 s with events at their beginning, and counter generations."""

    def __init__(self, detector=None, job=True):
        self.detector, self.topology, self.tick = detector or Xid(), topology(job), 0
        self.values = {"gpu": {"gpu.generation": np.full(8, 1.7e9)}, "node": {"node.generation": np.full(2, 1.7e9)}}

    @property
    def now(self):
        return T0 + self.tick * 10 * SECOND

    def show(self, *events, ticks=1):
        found = []
        for k in range(ticks):
            by_class = {"gpu": [], "node": []}
            for event in events if k == 0 else ():
                by_class.setdefault(class_of_entity(event.entity), []).append(event)
            names = {"gpu": GPUS, "node": NODES}
            frames = {}
            for c, mine in by_class.items():
                values = {name: column.copy() for name, column in self.values.get(c, {}).items()}
                frames[c] = Frame(self.now + 9 * SECOND, c, names.get(c, ()), values, self.topology, tuple(mine))
            found += self.detector.observe(frames)
            self.tick += 1
        return found

    def show_links(self, state):
        """Shows a frame of one NVLink with a state, NaN: not measured; none without a state."""
        if state is not None:
            values = {"nvlink.state": np.full(1, state)}
            self.detector.observe({"nvlink": Frame(self.now, "nvlink", ("nvlink:n0.1.0",), values, self.topology)})

    def xid(self, code, gpu=GPU, after=0.0, **data):
        known = shipped_xid_table().find_xid(code)
        facts = {"name": known.name, "action": known.action, "then": known.next_action, "severity": known.severity}
        return Event(self.now + int(after * SECOND), gpu, "xid", {"xid": code, **facts, **data})

    def event(self, kind, entity=GPU, **data):
        return Event(self.now, entity, kind, data)


def levels(found):
    return {f.entity: f.level for f in found if not f.evidence.get("cleared")}


def cleared(found):
    return {f.entity for f in found if f.evidence.get("cleared")}


def test_every_xid_of_the_catalogue_has_a_level():
    assert set(shipped_xid_table().xids) <= xid_levels.ALL
    assert not xid_levels.PAGE & xid_levels.TICKET
    assert not (xid_levels.PAGE | xid_levels.TICKET) & xid_levels.SUSPECT


def test_xids_that_require_a_reset_or_reboot_page_except_links_and_resources():
    loud = {c for c, x in shipped_xid_table().xids.items() if x.action in ("reset GPU", "reboot node")}
    assert loud - xid_levels.PAGE == {136, 155, 156}


@pytest.mark.parametrize(
    ("code", "level"),
    [
        *((code, "page") for code in (46, 64, 79, 95, 109, 119, 120)),
        *((code, "ticket") for code in (39, 63, 92, 94, 999)),
        *((code, "suspect") for code in (13, 31, 74, 121)),
    ],
)
def test_a_single_xid_has_the_level_of_the_catalogue(code, level):
    site = Site()
    assert levels(site.show(site.xid(code), ticks=3)) == {GPU: level}


def test_a_gpu_off_the_bus_pages_in_the_frame_of_its_event():
    site = Site()
    assert levels(site.show(site.xid(79))) == {GPU: "page"}
    site = Site()
    assert levels(site.show(site.event("gpu_lost"))) == {GPU: "page"}


def test_the_drivers_action_precedes_the_catalogue():
    site = Site()
    found = site.show(site.xid(94), site.xid(154, after=0.5, **RESET), ticks=3)
    assert levels(found) == {GPU: "page"}
    assert ": reset GPU" in found[-1].summary
    site = Site()
    assert levels(site.show(site.xid(63, action="reset GPU", action_source="driver"), ticks=3)) == {GPU: "page"}


def test_a_contained_error_that_requires_a_reset_pages():
    site = Site()
    assert levels(site.show(site.xid(94, detail={"reset_required": True}), ticks=3)) == {GPU: "page"}


def test_an_uncorrected_error_with_its_row_replaced_is_a_ticket_and_alone_a_page():
    site = Site()
    found = site.show(site.xid(48), site.xid(63, after=0.01), site.xid(94, after=0.02), ticks=3)
    assert levels(found) == {GPU: "ticket"}
    assert "drain, then reset GPU" in found[-1].summary
    site = Site()
    assert levels(site.show(site.xid(48), ticks=3)) == {GPU: "page"}
    site = Site()
    assert levels(site.show(site.xid(48), site.xid(63), site.xid(95), ticks=3)) == {GPU: "page"}


def test_a_row_remapped_one_frame_later_makes_an_uncorrected_error_a_ticket():
    site = Site()
    found = site.show(site.xid(48, after=8.9))
    found += site.show(site.xid(63), ticks=2)
    assert levels(found) == {GPU: "ticket"}


def test_program_errors_on_several_gpus_blame_the_job():
    site = Site()
    events = [site.xid(code, gpu, 0.4 * k) for k, gpu in enumerate(GPUS[:3]) for code in (13, 43)]
    found = site.show(*events, ticks=4)
    assert levels(found) == {"job:7": "suspect"}
    assert "a program error" in found[0].summary


@pytest.mark.parametrize("code", [43, 45])
@pytest.mark.parametrize("gpus", [GPUS[:1], GPUS[:2]])
@pytest.mark.parametrize("apart", [0.0, 25.0])
def test_a_process_that_ended_is_its_jobs_and_no_sign_of_a_faulty_gpu(code, gpus, apart):
    site = Site()
    found = []
    for k, gpu in enumerate(gpus):
        found += site.show(site.xid(code, gpu), ticks=1 + (round(apart / 10) if k == 0 else 3))
    assert levels(found) == {"job:7": "suspect"}
    assert "a process that ended" in found[0].summary


def test_processes_that_end_with_another_error_of_their_job_are_no_findings():
    site = Site()
    events = [site.xid(13, GPU), *(site.xid(43, g, 0.2) for g in GPUS[2:])]
    assert levels(site.show(*events, ticks=4)) == {GPU: "suspect"}
    site = Site()
    events = [site.xid(79, GPU), *(site.xid(43, g, 0.2) for g in GPUS[2:])]
    assert levels(site.show(*events, ticks=4)) == {GPU: "page"}


def test_a_process_that_ended_hides_no_later_error_of_its_gpu():
    site = Site()
    site.show(site.xid(43), ticks=30)
    assert levels(site.show(site.xid(31), ticks=3))[GPU] == "suspect"
    site = Site()
    site.show(site.xid(43), ticks=3)
    assert levels(site.show(site.xid(154, **RESET), ticks=3))[GPU] == "page"


def test_a_level_that_the_site_sets_for_ended_processes_counts():
    site = Site(detector=Xid(tickets=(43,)))
    assert levels(site.show(site.xid(43), ticks=3))[GPU] == "ticket"


def test_without_a_known_job_no_gpu_is_blamed_either():
    site = Site(job=False)
    found = site.show(*(site.xid(31, gpu) for gpu in GPUS[:3]), ticks=4)
    assert levels(found) == {"node:n0": "suspect"}


def test_the_only_gpu_that_needs_a_reset_is_blamed_itself():
    site = Site()
    events = [site.xid(13, GPU), site.xid(154, GPU, 0.3, **RESET), *(site.xid(43, g) for g in GPUS[2:])]
    assert levels(site.show(*events, ticks=4))[GPU] == "page"


def test_a_program_after_which_several_gpus_need_a_reset_is_a_ticket():
    site = Site()
    events = [e for g in GPUS[:3] for e in (site.xid(31, g), site.xid(154, g, 0.3, **RESET))]
    found = levels(site.show(*events, ticks=4))
    assert found == {"job:7": "suspect", **dict.fromkeys(GPUS[:3], "ticket")}


def test_repeated_xids_in_the_same_unit_of_a_gpu_are_a_ticket():
    site = Site()
    place = {"detail": {"gpc": 3, "tpc": 1, "sm": 0}}
    assert levels(site.show(site.xid(13, **place), ticks=100)) == {GPU: "suspect"}
    found = site.show(site.xid(13, **place), ticks=3)
    assert levels(found) == {GPU: "ticket"}
    assert "2 times in GPC 3 TPC 1" in found[-1].summary


def test_xids_of_one_gpu_under_two_jobs_are_a_ticket():
    site = Site()
    site.show(site.xid(31), ticks=100)
    site.topology.merge({"rank:7.1": ["job:8", GPU]})
    assert levels(site.show(site.xid(31), ticks=3)) == {GPU: "ticket"}


def test_repeated_xids_of_one_job_stay_suspects():
    site = Site()
    site.show(site.xid(31), ticks=100)
    assert levels(site.show(site.xid(31), ticks=3))[GPU] == "suspect"


def test_an_xid_caused_by_another_gpu_belongs_to_that_gpu():
    site = Site()
    root = {"xid": 79, "entity": GPU, "time": site.now}
    found = site.show(site.xid(79), site.xid(45, GPUS[2], root=root), site.xid(74, GPUS[3], root=root), ticks=8)
    assert levels(found) == {GPU: "page"}
    assert found[-1].evidence["also_struck"] == [GPUS[2], GPUS[3]]


@pytest.mark.parametrize(
    "over",
    [
        lambda s: s.event("gpu_back"),
        lambda s: s.event("counter_reset", signals=["gpu.dram_corrected"]),
        lambda s: s.event("recovery_action", **{"from": 1, "to": 0, "action": "none"}),
        lambda s: s.xid(154, detail={"to": 0}, action="none"),
    ],
)
def test_a_fatal_xid_holds_until_the_drivers_all_clear(over):
    site = Site()
    found = site.show(site.xid(79), ticks=400)
    assert found[-1].evidence["holds"] is True
    assert cleared(found) == set()
    assert cleared(site.show(over(site))) == {GPU}
    assert levels(site.show(site.xid(79))) == {GPU: "page"}


@pytest.mark.parametrize(("device_class", "signal"), [("gpu", "gpu.generation"), ("node", "node.generation")])
def test_a_restart_of_the_gpu_or_node_ends_it(device_class, signal):
    site = Site()
    site.show(site.xid(79), ticks=30)
    site.values[device_class][signal][:] = site.now / SECOND
    assert cleared(site.show(ticks=2)) == {GPU}


def test_a_generation_older_than_the_fault_ends_nothing():
    site = Site()
    site.values["gpu"]["gpu.generation"][:] = T0 / SECOND - 60
    assert cleared(site.show(site.xid(79), ticks=30)) == set()


def test_an_event_after_an_hour_begins_a_new_condition():
    site = Site()
    first = site.show(site.xid(79), ticks=400)
    again = site.show(site.xid(79), ticks=2)
    assert {f.onset for f in again}.isdisjoint(f.onset for f in first)


def test_faults_during_maintenance_page_only_if_they_outlast_it():
    site = Site()
    site.show(site.event("maintenance_start", "node:n0", seconds=3600.0))
    assert set(levels(site.show(site.xid(79), ticks=30)).values()) == {"suspect"}
    found = site.show(site.event("maintenance_end", "node:n0"), ticks=20)
    assert levels(found) == {GPU: "page"}


def test_the_drivers_state_replaces_a_lost_event():
    site = Site()
    site.values["gpu"]["gpu.recovery_action"] = np.zeros(8)
    site.show(ticks=5)
    site.values["gpu"]["gpu.recovery_action"][1] = 2
    found = site.show(ticks=3)
    assert levels(found) == {GPU: "page"}
    assert "reboot node" in found[0].summary
    site.values["gpu"]["gpu.recovery_action"][1] = 0
    assert cleared(site.show(ticks=2)) == {GPU}


def test_a_gpu_that_is_absent_for_two_frames_is_lost():
    site = Site()
    site.values["gpu"]["gpu.present"] = np.ones(8)
    site.values["gpu"]["gpu.present"][1] = 0
    assert levels(site.show(ticks=3)) == {GPU: "page"}


@pytest.mark.parametrize(
    ("pattern", "level"),
    [
        *((name, "page") for name in ("machine_check", "edac_uncorrected", "aer_fatal", "file_system_read_only")),
        *(("panic", "page"), ("oops", "ticket"), ("nvme_failed", "ticket"), ("io_error", "suspect")),
    ],
)
def test_faults_of_a_server_blame_the_node(pattern, level):
    site = Site()
    found = site.show(site.event("kernel", "node:n1", pattern=pattern, text="what the kernel said"), ticks=3)
    assert levels(found) == {"node:n1": level}
    assert found[0].evidence["log"] == ["what the kernel said"]


def test_bmc_log_entries_count_except_corrected_errors():
    site = Site()
    quiet = [site.event("sel", NODES[0], type="memory", event="correctable error", asserted=True)]
    quiet.append(site.event("sel", NODES[0], type="processor", event="internal error", asserted=False))
    quiet.append(site.event("redfish", NODES[0], severity="Critical", message="Power supply 1 lost its input"))
    assert site.show(*quiet, ticks=3) == []
    loud = site.event("sel", NODES[0], type="processor", event="internal error", asserted=True, sensor="CPU0")
    assert levels(site.show(loud, ticks=3)) == {NODES[0]: "page"}
    output = site.event("redfish", NODES[1], severity="Critical", message="An uncorrectable memory error was detected")
    assert levels(site.show(output, ticks=3)) == {NODES[1]: "page"}


def test_a_gpu_off_the_bus_is_one_page_with_its_servers_messages():
    site = Site()
    events = [site.event("kernel", "node:n0", pattern="aer_fatal"), site.xid(79, after=0.2)]
    events.append(site.event("gpu_count", "node:n0", expected=4, present=3, missing=["0000:43:00"]))
    assert levels(site.show(*events, ticks=5)) == {GPU: "page"}


def test_a_server_with_missing_gpus_pages_until_they_are_back():
    site = Site()
    found = site.show(site.event("gpu_count", "node:n0", expected=4, present=3, missing=["0000:43:00"]), ticks=3)
    assert levels(found) == {"node:n0": "page"}
    assert "3 of 4 GPUs present, missing 0000:43:00" in found[0].summary
    assert cleared(site.show(site.event("gpu_count", "node:n0", expected=4, present=4))) == {"node:n0"}


@pytest.mark.parametrize("sources", [("pci", "nvml"), ("nvml", "pci")])
def test_missing_gpus_end_when_each_source_that_missed_them_counts_enough(sources):
    """At each start of an agent both report: GPUs are on the bus that the driver does not see."""
    site = Site()
    first, second = ({"source": source, "expected": 4} for source in sources)
    assert levels(site.show(site.event("gpu_count", "node:n0", present=3, **first), ticks=3)) == {"node:n0": "page"}
    assert cleared(site.show(site.event("gpu_count", "node:n0", present=4, **second), ticks=3)) == set()
    site.show(site.event("gpu_count", "node:n0", present=2, **second), ticks=3)
    assert cleared(site.show(site.event("gpu_count", "node:n0", present=4, **first), ticks=3)) == set()
    assert cleared(site.show(site.event("gpu_count", "node:n0", present=4, **second))) == {"node:n0"}


def test_a_source_that_misses_gpus_for_days_still_does_when_another_one_began_to():
    site = Site()
    few, all_there = {"expected": 4, "present": 3}, {"expected": 4, "present": 4}
    site.show(site.event("gpu_count", "node:n0", source="pci", **few), ticks=3)
    site.tick += 3 * 8640
    site.show(site.event("gpu_count", "node:n0", source="nvml", **few), ticks=3)
    assert cleared(site.show(site.event("gpu_count", "node:n0", source="nvml", **all_there))) == set()
    assert cleared(site.show(site.event("gpu_count", "node:n0", source="pci", **all_there))) == {"node:n0"}


def test_a_site_can_set_levels():
    site = Site(Xid(pages=(63,), suspects=(109,)))
    assert levels(site.show(site.xid(63), site.xid(109, GPUS[5]), ticks=3)) == {GPU: "page", GPUS[5]: "suspect"}


def test_a_driver_reload_pages_only_if_the_gpus_stay_away():
    site = Site()
    lost = [site.event("gpu_lost", gpu) for gpu in GPUS[:4]]
    assert site.show(*lost, ticks=6) == []
    assert site.show(*(site.event("gpu_back", gpu) for gpu in GPUS[:4]), ticks=30) == []
    found = site.show(*(site.event("gpu_lost", gpu) for gpu in GPUS[:4]), ticks=20)
    assert levels(found) == dict.fromkeys(GPUS[:4], "page")


def test_slow_and_refused_calls_are_suspects():
    site = Site()
    found = site.show(site.event("slow_call", seconds=4.0), site.event("nvml_refused", GPUS[2], calls=["x"]), ticks=3)
    assert levels(found) == {GPU: "suspect", GPUS[2]: "suspect"}


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["xid", "sxid", "recovery_action", "gpu_count", "kernel", "sel", "redfish", "slow_call"]),
            st.sampled_from([*GPUS, *NODES, "port:n0.p1", "gpu:", "weird"]),
            st.dictionaries(
                st.sampled_from(["xid", "root", "detail", "to", "action", "count", "present", "expected", "seconds"]),
                st.one_of(
                    st.none(), st.integers(-5, 200), st.text(max_size=5), st.just({"entity": GPU}), st.booleans()
                ),
            ),
        ),
        max_size=12,
    )
)
def test_malformed_events_cause_no_error(events):
    site = Site()
    for kind, entity, data in events:
        site.show(Event(site.now, entity, kind, data), ticks=2)
    restored = Xid()
    restored.restore(site.detector.snapshot())
    site.show(ticks=2)


def test_drain_and_reset_is_a_ticket_unless_the_xid_pages():
    for code in (94, 63):
        site = Site()
        found = site.show(site.xid(code), site.xid(154, after=0.1, detail={"to": 4}), ticks=3)
        assert levels(found) == {GPU: "ticket"}
        assert ": drain and reset GPU" in found[-1].summary
    site = Site()
    assert levels(site.show(site.xid(95), site.xid(154, detail={"to": 4}), ticks=3)) == {GPU: "page"}


@pytest.mark.parametrize("to", [99, 10**30, "?", None, [1], {"a": 1}, True, float("nan")])
def test_an_unknown_action_does_not_page(to):
    site = Site()
    found = site.show(site.event("recovery_action", to=to), site.event("recovery_action", "ghost:zz", to=1), ticks=3)
    assert set(levels(found).items()) <= {(GPU, "ticket")}
    assert not any("None" in f.summary for f in found)
    site = Site()
    assert "page" not in levels(site.show(site.xid(154, detail={"to": to}), ticks=3)).values()


def test_an_action_given_by_number_is_named():
    site = Site()
    found = site.show(site.event("recovery_action", to=1), ticks=3)
    assert levels(found) == {GPU: "page"}
    assert found[0].summary.endswith(": driver requests: reset GPU")


def test_a_malformed_event_hides_no_other_of_its_frame():
    site = Site()
    malformed = site.event("gpu_count", "node:n1", present=3, expected=4, missing=5)
    assert levels(site.show(malformed, site.xid(79), ticks=3))[GPU] == "page"


def test_the_end_states_its_reason():
    site = Site()
    site.show(site.xid(79))
    (end,) = site.show(site.event("recovery_action", to=0))
    assert "the driver needs no action any more" in end.summary
    assert end.evidence["clears"]


def test_a_switchs_message_about_a_link_is_left_to_link_nvlink_unless_it_is_fatal():
    site = Site()
    assert site.show(site.event("sxid", NODES[0], sxid=20001, name="TX Replay Error", fatal=False), ticks=4) == []
    (found, *_) = site.show(site.event("sxid", NODES[0], sxid=20034, name="LTSSM Fault Up", fatal=True), ticks=4)
    assert "SXid 20034 LTSSM Fault Up" in found.summary


@pytest.mark.parametrize("state", [1.0, np.nan, None])
def test_an_nvlink_error_that_recurs_pages_where_no_link_is_read_and_else_is_left_to_link_nvlink(state):
    site = Site()
    site.show_links(state)
    first, again = site.show(site.xid(74), ticks=5), site.show(site.xid(74), ticks=2)
    assert {f.level for f in first} == {"suspect"}
    assert {f.level for f in again} <= {"suspect"} if state == 1.0 else again[0].level == "page"


@pytest.mark.parametrize(("ticks", "level"), [(5, "page"), (120, "page"), (359, "page"), (370, "suspect")])
def test_an_nvlink_error_recurs_also_after_its_case_is_over_within_an_hour(ticks, level):
    site = Site()
    site.show(site.xid(74), ticks=ticks)
    assert levels(site.show(site.xid(74), ticks=2)) == {GPU: level}
    quiet = 350 if level == "page" else 60
    assert site.show(ticks=quiet) != []
    assert site.show(ticks=20)[2:] == []


@pytest.mark.parametrize("state", [1.0, np.nan, None])
def test_a_fatal_message_of_a_switch_pages_where_no_link_is_read_until_its_gpus_are_reset(state):
    site = Site()
    site.show_links(state)
    found = site.show(site.event("sxid", NODES[0], sxid=20034, name="LTSSM Fault Up", fatal=True), ticks=2)
    assert {f.level for f in found} == {"suspect" if state == 1.0 else "page"}
    (end,) = site.show(site.event("counter_reset"), ticks=2)
    assert (end.entity, end.score) == (NODES[0], 0.0)
