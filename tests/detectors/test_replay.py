"""Replay: files in, findings and incidents out, the same each time."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detectors import configured
from detectors.replay import replay
from detectors.runner import Runner
from pipeline.config.sections import Config, ModeRule, Pipeline
from pipeline.incidents.desk import Desk
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso

START = 1_790_000_000 * SECOND
FIELDS = ["time", "onset", "entity", "detector", "level", "score", "summary", "evidence", "signals"]


@pytest.fixture
def recording(tmp_path, site):
    """200 instants of the small site: a pump fails, a GPU gives wrong digests; all as files."""
    columns = {c: {} for c in ("coolant", "rank", "gpu")}
    events = []
    for tick in range(200):
        values = site.values()
        if tick >= 100:
            for signal in ("coolant.flow", "pump.speed"):
                values["coolant"][signal][0] *= 0.5
        for device_class, rows in columns.items():
            rows.setdefault("time", []).extend([START + tick * 10 * SECOND] * len(site.names[device_class]))
            rows.setdefault("entity", []).extend(site.names[device_class])
            for signal, column in values[device_class].items():
                rows.setdefault(signal, []).extend(column.tolist())
        if tick % 10 == 0:
            for g, gpu in enumerate(site.names["gpu"]):
                answer = "wrong" if g == 5 and tick >= 120 else "right"
                data = {"canary": "gemm", "version": "1", "digest": answer}
                events.append({"time": iso(START + tick * 10 * SECOND), "entity": gpu, "kind": "digest", "data": data})
    for device_class, rows in columns.items():
        rows["time"] = pa.array(rows["time"], pa.timestamp("us", "UTC"))
        pq.write_table(pa.table(rows), tmp_path / f"telemetry-{device_class}.parquet")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = ["version = 1"]
    for kind in dict.fromkeys(e.split(":")[0] for e in site.topology.parents):
        lines.append(f"[{kind}]")
        for entity, above in site.topology.parents.items():
            if entity.startswith(f"{kind}:"):
                lines.append(f"{json.dumps(entity.split(':', 1)[1])} = {json.dumps(list(above))}")
    (tmp_path / "topology.toml").write_text("\n".join(lines))
    return tmp_path


def run(folder, name="findings.jsonl", config=None, **more):
    inputs = sorted(folder.glob("telemetry-*.parquet"))
    more = {"events": [folder / "events.jsonl"], "topology": folder / "topology.toml", **more}
    status = replay(config or Config(), inputs, folder / name, **more)
    return status, [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_findings_carry_the_fields_of_the_contract_in_order_of_time(recording):
    status, found = run(recording)
    assert status == 1
    assert all(list(f) == FIELDS for f in found)
    assert [f["time"] for f in found] == sorted(f["time"] for f in found)
    assert all(f["onset"] <= f["time"] for f in found)
    assert {(f["entity"], f["detector"]) for f in found} == {("cdu:c0", "coolant"), ("gpu:n1.1", "sdc")}


@pytest.mark.slow
def test_two_replays_are_equal_byte_for_byte(recording):
    run(recording, "a.jsonl")
    run(recording, "b.jsonl")
    assert (recording / "a.jsonl").read_bytes() == (recording / "b.jsonl").read_bytes()


@pytest.mark.slow
def test_replay_gives_the_findings_of_the_detectors_on_the_same_frames(recording, site, watch):
    """The noise differs from that in the files, but time and entity of the page are the same."""

    def change(tick, values):
        if tick >= 100:
            for signal in ("coolant.flow", "pump.speed"):
                values["coolant"][signal][0] *= 0.5

    live = [f for f in watch(Runner(configured()), site, 200, change) if f.level == "page"]
    page = next(f for f in run(recording)[1] if f["detector"] == "coolant")
    assert (page["entity"], page["time"]) == (live[0].entity, iso(live[0].time))


@pytest.mark.slow
def test_the_desk_makes_one_incident_of_each_fault(recording):
    run(recording, incidents=recording / "incidents.jsonl", desk=Desk)
    cases = [json.loads(line) for line in (recording / "incidents.jsonl").read_text().splitlines()]
    assert [(c["cause"], c["severity"]) for c in cases] == [("cdu:c0", "page"), ("gpu:n1.1", "page")]
    assert all({"id", "opened", "onset", "resolved", "members", "confidence"} <= c.keys() for c in cases)


@pytest.mark.slow
def test_a_detector_without_its_needs_is_off_and_logged(recording, capsys):
    run(recording, events=[])
    printed = capsys.readouterr()
    assert "link is off: the input has no nic.state" in printed.err
    assert "sdc is off: the input has no event:digest" in printed.err
    assert printed.out == ""


@pytest.mark.slow
def test_quiet_telemetry_ends_with_zero_and_an_empty_file(recording):
    (recording / "telemetry-coolant.parquet").unlink()
    assert run(recording, events=[]) == (0, [])


DECLARED = """version = 1
[signals."coolant.flow"]
unit = "L/min"
kind = "gauge"
class = "coolant"
help = "flow"
"""


def seconds_apart(folder):
    """60 samples a second apart, of which the last 20 show a loss of flow."""
    flow = np.where(np.arange(60) < 40, 300.0, 100.0) + np.arange(60) % 3
    times = pa.array(START + np.arange(60) * SECOND, pa.timestamp("us", "UTC"))
    table = pa.table({"time": times, "entity": ["cdu:c0"] * 60, "coolant.flow": flow})
    pq.write_table(table, folder / "t.parquet")


def test_rows_of_declared_signals_closer_than_a_frame_are_all_judged(tmp_path):
    """On a grid of 10 s there would be 6 samples, too few to have learnt from."""
    seconds_apart(tmp_path)
    (tmp_path / "signals.toml").write_text(DECLARED)
    more = {"signals": tmp_path / "signals.toml"}
    assert replay(Config(), [tmp_path / "t.parquet"], tmp_path / "f.jsonl", **more) == 1
    first = json.loads((tmp_path / "f.jsonl").read_text().splitlines()[0])
    assert first["time"] == iso(START + 41 * SECOND)


@pytest.mark.slow
def test_a_recording_of_a_fleet_is_evaluated_on_the_tick_grid_of_the_pipeline(tmp_path, recording):
    seconds_apart(tmp_path)
    assert replay(Config(), [tmp_path / "t.parquet"], tmp_path / "f.jsonl") == 0
    assert replay(Config(pipeline=Pipeline(frame=1.0)), [tmp_path / "t.parquet"], tmp_path / "f.jsonl") == 1
    coarse = run(recording, "coarse.jsonl", Config(pipeline=Pipeline(frame=60.0)))[1]
    assert len({f["time"] for f in coarse}) < len({f["time"] for f in run(recording)[1]})


@pytest.mark.slow
def test_modes_of_the_configuration_apply_in_replay(recording):
    config = Config(modes=(ModeRule("record", "coolant"),))
    _, found = run(recording, config=config, incidents=recording / "incidents.jsonl", desk=Desk)
    assert {f["evidence"].get("mode") for f in found if f["detector"] == "coolant"} == {"record"}
    cases = [json.loads(line) for line in (recording / "incidents.jsonl").read_text().splitlines()]
    assert [c["cause"] for c in cases] == ["gpu:n1.1"]


@pytest.mark.slow
def test_the_configuration_of_detectors_applies_in_replay(recording):
    config = Config(detector={"sdc": {"quorum": 99}})
    assert "sdc" in {f["detector"] for f in run(recording)[1]}
    assert "sdc" not in {f["detector"] for f in run(recording, config=config)[1]}


def test_an_output_that_cannot_be_written_is_named(recording):
    with pytest.raises(UsageError, match=r"no/where\.jsonl: cannot be written"):
        run(recording, "no/where.jsonl")


def test_bad_input_leaves_no_output_behind(recording):
    (recording / "odd.csv").write_text("time,entity,coolant.flow\n2026-01-01T00:00:00Z,loop:a,1\nyesterday,loop:a,2\n")
    with pytest.raises(UsageError, match=r"odd\.csv"):
        replay(Config(), [recording / "odd.csv"], recording / "out.jsonl")
    assert not list(recording.glob("out.jsonl*"))
