"""Each ablation disables its part in every detector that has it, at any depth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.detection.ablations import FILE, VARIANTS, kept, pieces, read, row
from benchmarks.detection.results import scored
from detectors import configured
from detectors.base.cohorts import Peers
from detectors.base.streams import Streams
from detectors.heat.coolant import Coolant
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Frame, iso
from pipeline.model.topology import Topology

META = {"nodes": 1, "gpus": 8, "start": iso(0), "end": iso(86_400 * SECOND)}
NAMES = tuple(f"gpu:n{n}.{i}" for n in range(4) for i in range(8))
TOPOLOGY = Topology({name: [f"node:{name[4:6]}"] for name in NAMES})


def test_no_clip_and_no_freeze_reach_streams_of_parts_of_parts():
    whole = pieces(VARIANTS["whole"](), Streams)
    direct = [getattr(d, name) for d in configured() for name in vars(d) if isinstance(getattr(d, name), Streams)]
    assert len(whole) > len(direct) > 5
    assert all(s.channel.clip and s.channel.frozen for s in whole)
    for variant, left in (("no clip", (False, True)), ("no freeze", (True, False))):
        found = pieces(VARIANTS[variant](), Streams)
        assert len(found) == len(whole)
        assert {(s.channel.clip, s.channel.frozen) for s in found} == {left}


def test_no_cohort_leaves_no_peers():
    made = VARIANTS["no cohort"]()
    frame = Frame(SECOND, "gpu", NAMES, {}, TOPOLOGY)
    assert pieces(made, Peers)
    assert all((peers.groups(frame) == -1).all() for peers in pieces(made, Peers))
    for streams in pieces(made, Streams):
        values, groups = np.full(len(NAMES), 1.0), np.zeros(len(NAMES), np.int32)
        reported = streams.step(values, groups, SECOND)
        assert (reported._cohort.groups == -1).all()
        assert not reported.alone.any()


def test_no_hold_reaches_every_setting_by_which_a_page_waits():
    usual, hasty = VARIANTS["whole"](), VARIANTS["no hold"]()
    waits = {
        (d.name, name)
        for d, other in zip(hasty, usual, strict=True)
        for name, value in d.describe()["settings"].items()
        if value != other.describe()["settings"][name]
    }
    assert {("straggler", "hold"), ("thermal", "hold"), ("thermal", "patience")} <= waits
    assert {("straggler_inferred", "job_hold"), ("link_congestion", "hold"), ("coolant", "hold")} <= waits
    assert {("power", "brake_seconds"), ("memory", "wait")} <= waits
    assert not {name for name, _ in waits} & {"sdc_gradient", "sdc", "sdc_replica", "telemetry"}
    assert not waits & {("link", "drop"), ("straggler_job", "hang"), ("straggler_job", "stall")}


def test_no_corroboration_leaves_a_dry_loop_without_its_pump_and_pressure():
    (coolant,) = pieces(VARIANTS["no corroboration"](), Coolant)
    for witness in (coolant.pressure, coolant.speed):
        assert not witness.step(np.ones(4), np.zeros(4, np.int32), SECOND).measured.any()
    assert coolant.flow.step(np.ones(4), np.zeros(4, np.int32), SECOND).measured.all()


def test_no_corroboration_lets_a_slow_rank_wait_though_its_gpu_throttles(site, watch):
    def throttled(tick, values):
        if tick >= 60:
            values["rank"]["rank.compute_time"][3] *= 1.15
            values["gpu"]["gpu.throttle_reasons"][3] = 0x40

    waits = {}
    for variant in ("whole", "no corroboration"):
        (straggler,) = pieces(VARIANTS[variant](), Straggler)
        page = next(f for f in watch(straggler, type(site)(), 160, throttled) if f.level == "page")
        waits[variant] = (page.time - page.onset) / SECOND
    assert waits["whole"] <= 200
    assert waits["no corroboration"] >= 300


def test_missing_values_are_not_zero():
    nothing = scored({"findings": [], "incidents": [], "truth": [], "placed": [], "parents": {}, "meta": META})
    unkept = {**nothing, "kept": (0, 0)}
    assert row("whole", [unkept], [unkept]).count(" - |") == 5


@pytest.mark.parametrize(
    ("hours", "resolved", "counts"), [(5, 5, (1, 1)), (5, None, (1, 1)), (5, 2, (0, 1)), (3, 2, (0, 0))]
)
def test_a_long_fault_is_kept_if_its_incident_is_open_at_its_end(hours, resolved, counts):
    end, until = iso(hours * 3600 * SECOND), None if resolved is None else iso(resolved * 3600 * SECOND)
    result = {"truth": [{"id": "fault-1", "end": end}], "incidents": [{"id": "inc-1", "resolved": until}]}
    events = [{"id": "fault-1", "incident": "inc-1", "length_s": hours * 3600.0}, {"incident": None, "length_s": 9e4}]
    assert kept(result, {"records": {"events": events}}) == counts


def test_holds_of_parts_are_those_of_their_detector():
    for detector in VARIANTS["no hold"]():
        for piece in pieces(detector, object):
            for name in ("hold", "job_hold"):
                if detector.name != "sdc_gradient" and isinstance(getattr(piece, name, None), float):
                    assert getattr(piece, name) == 0.0, f"{detector.name}: {type(piece).__name__}.{name}"


def test_the_page_has_the_table_with_its_code_version_and_never_a_small_one(tmp_path):
    assert read(tmp_path, "now") == ""
    reported = {"table": "| a |\n", "code": "now", "worlds": [0, 1], "scale": 1.0}
    (tmp_path / FILE).write_text(json.dumps(reported))
    assert read(tmp_path, "now") == "Training structures: 0, 1.\n\n| a |\n"
    assert read(tmp_path, "then") == "Training structures: 0, 1, judged by `now`.\n\n| a |\n"
    (tmp_path / FILE).write_text(json.dumps({**reported, "scale": 0.1}))
    assert read(tmp_path, "now") == ""
