"""Findings depend only on the telemetry: a running pipeline and a replay of its input give the same findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.sim.command import SimulateOptions, simulate
from detectors import configured
from detectors.replay import replay
from detectors.runner import Runner
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.incidents import ledger
from pipeline.incidents.desk import Desk
from pipeline.model.records import from_iso
from pipeline.recording.reader import FOREVER
from pipeline.recording.writer import RecordingWriter

NOW = from_iso("2026-06-01T12:00:00Z")
TEXT = """version = 1
duration = 3000
interval = {interval}
[fleet]
nodes = 12
gpus_per_node = 4
missing = 0.01
jitter = {jitter}
[[fault]]
kind = "straggler"
onset = 1200
end = 2400
[[fault]]
kind = "coolant"
onset = 1500
end = 2300
[[fault]]
kind = "link_flap"
onset = 900
end = 2400
[[fault]]
kind = "gpu_off_bus"
onset = 1800
end = 2700
"""
MODES = [{"mode": "record", "detector": "thermal"}]


class RecordingRunner(Runner):
    """The runner of a pipeline; keeps its findings from frames and from events on arrival."""

    def __init__(self, detectors: Any) -> None:
        super().__init__(detectors)
        self.found: list[dict[str, Any]] = []
        self._framing = False

    def observe(self, frames: Any) -> Any:
        self._framing = True
        findings = super().observe(frames)
        self._framing = False
        self.found += [f.as_json() for f in findings]
        return findings

    def judge_events(self, events: Any, topology: Any, again: bool = False) -> Any:
        findings = super().judge_events(events, topology, again)
        if not self._framing:
            self.found += [f.as_json() for f in findings]
        return findings


def sorted_findings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts by time: findings on arrival come before those of frames of the same time."""
    return sorted(findings, key=lambda f: (f["time"], f["detector"], f["entity"], f["onset"], f["level"]))


def comparable(incidents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns incidents without `opened`, which live is when people could see it, and without the order of members."""
    return {id_: {**i, "opened": None, "members": sorted(i["members"])} for id_, i in incidents.items()}


def confirmed(incidents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a pipeline's incidents without those that their frames did not confirm: resolved at their onset.

    An event far ahead of the frames opens an incident immediately; if the frames then show an older condition of its
    cause, it is merged into that incident, which a replay opens alone.
    """
    merged = {id_ for id_, i in incidents.items() if i["resolved"] == i["onset"]}
    for id_ in merged:
        cause, members = incidents[id_]["cause"], set(incidents[id_]["members"])
        others = (i for other, i in incidents.items() if other not in merged and i["cause"] == cause)
        assert any(members <= set(i["members"]) for i in others), f"{id_} was withdrawn, and no other incident has it"
    return {id_: i for id_, i in incidents.items() if id_ not in merged}


def run_live(config: Config) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Returns the findings of a pipeline for the spools of a [spool], and its incidents by id."""
    judge = RecordingRunner(configured(config.detector, config.source))
    service = PipelineService(config, judge, clock=lambda: NOW)
    try:
        service.start_engine()
        while service.run_step():
            pass
        assert service.engine is not None
        assert service.engine.framer.late.total() == 0
        service.engine.advance(FOREVER)  # no more data: evaluate what the lateness still holds
        assert judge.errors == {}
        return judge.found, {i["id"]: i for i in ledger.list_incidents(service.database.cursor())}
    finally:
        service.close()


def run_replay(config: Config, folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Returns the same of a replay of the folder."""
    found, incidents = folder / "findings.jsonl", folder / "incidents.jsonl"
    telemetry, events, topology = (
        sorted(folder.glob("telemetry-*.parquet")),
        folder / "events.jsonl",
        folder / "topology.toml",
    )
    replay(config, telemetry, found, [events], None, topology, incidents, Desk)
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in (found, incidents)]
    return lines[0], {incident["id"]: incident for incident in lines[1]}


@pytest.mark.parametrize(
    ("interval", "jitter", "seed"),
    [
        (10, 5.0, 0),
        *(pytest.param(10, 5.0, seed, marks=pytest.mark.slow) for seed in (1, 2, 5)),
        *(pytest.param(2, 0.0, seed, marks=pytest.mark.slow) for seed in (0, 5)),
    ],
)
def test_a_pipeline_and_a_replay_of_its_input_give_the_same_findings(
    seed: int, interval: int, jitter: float, tmp_path: Path
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT.format(interval=interval, jitter=jitter))
    tables = {"store": {"path": str(tmp_path / "s.duckdb")}, "spool": {"directory": str(tmp_path / "spool")}}
    config = build_section(configuration.Config, {**tables, "modes": MODES}, "test")
    order = SimulateOptions(str(tmp_path / "scenario.toml"), seed, "spool", 0.0)
    simulate(order, config, RecordingWriter(tmp_path / "out"), lambda _: False, lambda: NOW, lambda _: None)
    findings, incidents = run_live(config)
    again, repeated = run_replay(config, tmp_path / "out")
    assert {f["detector"] for f in findings} >= {"coolant", "link", "xid"}
    modes = [f["evidence"].pop("mode", None) for f in again]  # a pipeline adds it after its detectors
    assert set(zip(modes, (f["detector"] == "thermal" for f in again), strict=False)) <= {
        ("record", True),
        (None, False),
    }
    assert sorted_findings(findings) == sorted_findings(again)
    assert comparable(confirmed(incidents)) == comparable(repeated)
