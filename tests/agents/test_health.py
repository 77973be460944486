"""Conditions that make a node unfit: begun by events, ended by events and values, written on change and every 10 s."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import Collector, Reading
from agents.collectors.canary.problems import PROBLEMS
from agents.collectors.canary.rounds import CanaryTask, run_round
from agents.node.agent import Agent
from agents.node.health import status_file
from agents.node.health.report import MAX_CONDITIONS, NodeHealth, open_health
from agents.node.health.rules import RULES, condition_names
from pipeline.config.sections import Agent as AgentSection
from pipeline.config.sections import Check, Config
from pipeline.config.sections import Spool as SpoolSection
from pipeline.model.event_kinds import EVENT_KINDS
from pipeline.model.records import SECOND, Event, Origin
from pipeline.model.signals import CATALOGUE

PROBLEM = next(problem for problem in PROBLEMS if problem.name == "gemm-f32-down5")
ROUND = CanaryTask("cpu", "v1", (PROBLEM,), 0, {PROBLEM.instance(0): "right"})
OK = CATALOGUE["leak.state"].states.index("ok")
NOW = 1_800_000_000 * SECOND
ORIGIN = Origin("local", "n1", bytes(16), False)
FATAL: dict[str, Any] = {"xid": 119, "name": "GSP RPC timeout", "severity": "critical", "action": "reset GPU"}
CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("gpu_lost", "critical", "gpu:n1.3", {"pci": "0000:1b:00.0", "serial": "165"}, "pci 0000:1b:00.0"),
    ("gpu_count", "critical", "node:n1", {"present": 7, "expected": 8, "source": "pci", "missing": ["x"]}, "7 of 8"),
    ("recovery_action", "critical", "gpu:n1.3", {"to": 1, "action": "reset GPU"}, "requires: reset GPU"),
    ("xid", "critical", "gpu:n1.3", FATAL, "XID 119 GSP RPC timeout: reset GPU"),
    (
        "sxid",
        "critical",
        "node:n1",
        {"sxid": 19084, "severity": "critical", "fatal": True, "action": "reset all GPUs and NVSwitches"},
        "SXid 19084",
    ),
    ("leak", "critical", "leak_detector:cdu1.1", {"state": "active", "leak": "critical"}, "critical"),
    ("leak", "warning", "leak_detector:cdu1.1", {"state": "active", "leak": "warning"}, "warning"),
    ("flow_collapse", "warning", "cdu:c1", {"state": "active", "value": 3.0, "usual": 40.0}, "3.0, usually 40.0"),
    ("pressure_collapse", "warning", "cdu:c1", {"state": "active", "value": 1.0, "usual": 4.0}, "1.0, usually"),
    ("digest", "warning", "gpu:n1.3", {"digest": "a1", "expected": "b2", "canary": "gemm"}, "returned a1, expected b2"),
    ("link_state", "warning", "port:n1.mlx5_0", {"state": "down", "from": "active", "to": "down"}, "active to down"),
]


def digest_event(answer: str) -> dict[str, Any]:
    """The event of a canary round with this result."""
    found = run_round(ROUND, "3", lambda problem, variant: answer)
    assert found is not None
    return found


def open_health_at(folder: Path, log: list[tuple[str, str]] | None = None) -> NodeHealth:
    def add(subject: str, text: str) -> None:
        if log is not None:
            log.append((subject, text))

    (folder / "n1").mkdir(parents=True, exist_ok=True)
    config = Config(agent=AgentSection(node="n1"), spool=SpoolSection(directory=folder))
    return open_health(config, ORIGIN, add, {})


def apply(health: NodeHealth, *events: Event, readings: tuple[Reading, ...] = ()) -> list[str]:
    health.update(readings, events, (), NOW)
    return [f"{one.name} {one.entity}" for one in health.conditions]


def event(kind: str, entity: str = "gpu:n1.3", **data: Any) -> Event:
    return Event(NOW, entity, kind, data)


def reading_of(signal: str, value: int, entity: str = "gpu:n1.3") -> tuple[Reading, ...]:
    return (Reading(signal.partition(".")[0], (entity,), {signal: np.array([value], np.uint8)}),)


def gpu_counts(found: int, expected: int) -> tuple[Reading, ...]:
    columns = {"node.gpu_pci": np.array([found]), "node.gpu_expected": np.array([expected])}
    return (Reading("node", ("node:n1",), columns),)


@pytest.mark.parametrize(
    ("kind", "level", "entity", "data", "text"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES]
)
def test_an_event_begins_a_condition_that_is_written_immediately(
    tmp_path: Path, kind: str, level: str, entity: str, data: dict[str, Any], text: str
) -> None:
    apply(open_health_at(tmp_path), Event(NOW, entity, kind, data))
    (found,) = json.loads((tmp_path / "n1" / "status.json").read_text())["conditions"]
    assert (found["level"], found["entity"], found["since"]) == (level, entity, NOW)
    assert text in found["text"]


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (event("gpu_lost"), event("gpu_back")),
        (event("xid", **FATAL), event("gpu_back")),
        (event("xid", **FATAL), event("counter_reset", signals=["gpu.energy"])),
        (event("xid", **FATAL), event("recovery_action", to=0, action="none")),
        (event("xid", "node:n1", **FATAL), event("counter_reset", signals=["gpu.energy"])),
        (event("recovery_action", to=2, action="reboot node"), event("recovery_action", to=0, action="none")),
        (event("xid", xid=154, detail={"to": 1}, action="reset GPU"), event("xid", xid=154, detail={"to": 0})),
        (
            event("gpu_count", "node:n1", present=7, expected=8, source="nvml"),
            event("gpu_count", "node:n1", present=8, expected=8, source="nvml"),
        ),
        (
            event("leak", "leak_detector:a", leak="critical"),
            event("leak", "leak_detector:a", state="cleared", leak="ok"),
        ),
        (event("flow_collapse", "cdu:a", state="active"), event("flow_collapse", "cdu:a", state="cleared")),
        (event("digest", **digest_event("wrong")), event("digest", **digest_event("right"))),
        (event("link_state", "port:n1.a", state="down"), event("link_state", "port:n1.a", state="up")),
    ],
    ids=lambda e: f"{e.kind} {e.entity}",
)
def test_the_end_of_a_condition_removes_it(tmp_path: Path, begins: Event, ends: Event) -> None:
    health = open_health_at(tmp_path)
    assert len(apply(health, begins)) == 1
    assert apply(health, ends) == []


def test_a_wrong_canary_round_is_cleared_by_a_correct_one_with_another_name() -> None:
    assert (digest_event("wrong")["canary"], digest_event("right")["canary"]) == ("gemm-f32-down5.0", "cpu.0")


@pytest.mark.parametrize(
    ("begins", "readings"),
    [
        (event("gpu_lost"), reading_of("gpu.present", 1)),
        (event("recovery_action", to=1, action="reset GPU"), reading_of("gpu.recovery_action", 0)),
        (event("leak", "leak_detector:a", leak="warning"), reading_of("leak.state", OK, "leak_detector:a")),
        (event("link_state", "port:n1.a", state="down"), reading_of("nic.state", 1, "port:n1.a")),
        (event("gpu_count", "node:n1", present=0, expected=1, source="nvml"), reading_of("gpu.present", 1)),
        (event("gpu_count", "node:n1", present=7, expected=8, source="pci"), gpu_counts(8, 8)),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
def test_healthy_values_end_conditions_that_a_restarted_collector_does_not_end(
    tmp_path: Path, begins: Event, readings: tuple[Reading, ...]
) -> None:
    health = open_health_at(tmp_path)
    assert len(apply(health, begins)) == 1
    assert apply(health, readings=readings) == []


@pytest.mark.parametrize(
    "harmless",
    [
        event("xid", xid=13, severity="info", action="restart app"),
        event("xid", xid=165, severity="critical", action="plan a replacement"),
        event("xid", **FATAL, root={"xid": 79}),
        event("sxid", "node:n1", sxid=11012, severity="warning", action="none"),
        event("recovery_action", to=0, action="none"),
        event("gpu_count", "node:n1", present=9, expected=8, source="pci"),
        event("gpu_count", "node:n1"),
        event("service", "service:n1.x", **{"from": "active", "to": "failed"}),
    ],
    ids=lambda e: f"{e.kind} {dict(e.data)}",
)
def test_an_uncertain_event_leaves_the_node_fit(tmp_path: Path, harmless: Event) -> None:
    assert apply(open_health_at(tmp_path), harmless) == []


def test_missing_gpus_remain_a_condition(tmp_path: Path) -> None:
    health = open_health_at(tmp_path)
    fewer = [event("gpu_count", "node:n1", present=7, expected=8, source=source) for source in ("pci", "nvml")]
    readings = (*gpu_counts(7, 8), *reading_of("gpu.present", 1), *reading_of("gpu.present", 0))
    assert apply(health, *fewer, readings=readings) == ["gpu_count.pci node:n1", "gpu_count.nvml node:n1"]


def test_a_reset_of_a_port_ends_no_error_of_a_gpu(tmp_path: Path) -> None:
    health = open_health_at(tmp_path)
    assert apply(health, event("xid", **FATAL), event("xid", "node:n1", **FATAL)) != []
    assert len(apply(health, event("counter_reset", "port:n1.mlx5_0", signals=["nic.rx"]))) == 2
    assert (
        len(apply(health, event("counter_reset", "gpu:n1.0", signals=["gpu.energy"]))) == 1
    )  # gpu:n1.3 has its own reset


def test_a_reset_of_the_nodes_own_counters_ends_no_fatal_error(tmp_path: Path) -> None:
    health = open_health_at(tmp_path)
    fatal = {"severity": "critical", "fatal": True, "action": "reset all GPUs and NVSwitches"}
    both = [event("sxid", "node:n1", sxid=24001, **fatal), event("xid", "node:n1", **FATAL)]
    assert apply(health, *both) == ["sxid.24001 node:n1", "xid.119 node:n1"]
    assert len(apply(health, event("counter_reset", "node:n1", signals=["node.cpu_iowait_time"]))) == 2
    assert apply(health, event("counter_reset", "gpu:n1.0", signals=["gpu.energy"])) == []


def test_fatal_errors_survive_a_restart_of_the_agent_but_not_a_boot(tmp_path: Path) -> None:
    apply(open_health_at(tmp_path), event("xid", **FATAL), event("flow_collapse", "cdu:a", state="active"))
    assert apply(open_health_at(tmp_path)) == ["xid.119 gpu:n1.3"]
    file = tmp_path / "n1" / "status.json"
    file.write_text(file.read_text().replace(status_file.read_boot_id(), "another"))
    assert apply(open_health_at(tmp_path)) == []


@given(st.one_of(st.binary(max_size=200), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(
    lambda value: json.dumps(
        {"version": 1, "node": "n1", "boot": status_file.read_boot_id(), "conditions": value}
    ).encode()
)))  # fmt: skip
def test_no_invalid_status_file_stops_the_agent(tmp_path_factory: pytest.TempPathFactory, left: bytes) -> None:
    folder = tmp_path_factory.mktemp("spool")
    (folder / "n1").mkdir()
    (folder / "n1" / "status.json").write_bytes(left)
    assert apply(open_health_at(folder)) == []


def test_a_storm_of_errors_stays_bounded(tmp_path: Path) -> None:
    health = open_health_at(tmp_path)
    assert (
        len(apply(health, *(event("xid", f"gpu:n1.{i}", **FATAL) for i in range(2 * MAX_CONDITIONS)))) == MAX_CONDITIONS
    )
    assert (tmp_path / "n1" / "status.json").stat().st_size < status_file.MAX_BYTES


def test_a_storm_of_warnings_does_not_hide_a_critical_condition(tmp_path: Path) -> None:
    health = open_health_at(tmp_path)
    downs = [event("link_state", f"port:leaf-1.{i}", state="down") for i in range(2 * MAX_CONDITIONS)]
    found = apply(health, *downs, event("gpu_lost", "gpu:n1.3", gpu=3))
    assert len(found) == MAX_CONDITIONS
    assert "gpu_lost gpu:n1.3" in found


def test_the_file_is_readable_for_monitoring_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        apply(open_health_at(tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / "n1" / "status.json").stat().st_mode & 0o777 == 0o644


def test_a_path_that_cannot_be_written_is_logged_and_the_other_one_is_written(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    away = tmp_path / "away" / "status.json"
    (tmp_path / "n1").mkdir()
    config = Config(
        agent=AgentSection(node="n1"), spool=SpoolSection(directory=tmp_path), check=Check(status_file=away)
    )
    health = open_health(config, ORIGIN, lambda *both: log.append(both), {})
    apply(health)
    assert [text for _, text in log] == [
        "cannot be written: No such file or directory; fleetpulse check returns UNKNOWN"
    ]
    assert (tmp_path / "n1" / "status.json").exists()
    away.parent.mkdir()
    apply(health, event("gpu_lost"))
    assert log[-1][1] == "is written again"


@dataclass
class Losing(Collector):
    """A collector whose GPU is lost at its first read."""

    name = "losing"
    signals = ("gpu.present",)
    events = ("gpu_lost",)
    isolated = False

    def read(self) -> tuple[Reading, ...]:
        return (Reading("gpu", ("gpu:n1.3",), {"gpu.present": np.zeros(1, np.uint8)}, (event("gpu_lost"),)),)


def test_the_agent_writes_the_status_to_the_spool_and_to_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/run:{tmp_path}/other")
    config = Config(agent=AgentSection(node="n1"), spool=SpoolSection(directory=tmp_path / "spool"))
    with (tmp_path / "log").open("w") as log:
        agent = Agent(config, [Losing()], log=log, collect_share=5)
        agent.tick(NOW)
        agent.close()
    for file in (tmp_path / "run/n1.status.json", tmp_path / "spool/n1/status.json"):
        found = json.loads(file.read_text())
        assert [one["name"] for one in found["conditions"]] == ["gpu_lost"]
        assert found["collectors"]["losing"][0] == "ok"


def test_every_rule_has_an_existing_event_and_a_reason() -> None:
    assert {rule.kind for rule in RULES} | {kind for rule in RULES for kind in rule.ended_by} <= EVENT_KINDS.keys()
    assert all(rule.reason and rule.detail in ("", *EVENT_KINDS[rule.kind].data) for rule in RULES)
    assert len(condition_names()) == len(set(condition_names()))


def test_a_switch_error_that_is_not_fatal_by_its_driver_leaves_the_node_fit(tmp_path: Path) -> None:
    data = {"sxid": 20034, "severity": "critical", "action": "reset all GPUs and NVSwitches"}
    assert apply(open_health_at(tmp_path), event("sxid", "node:n1", **data, fatal=False)) == []
    assert apply(open_health_at(tmp_path), event("sxid", "node:n1", **data)) == ["sxid.20034 node:n1"]


def test_a_recovery_action_in_the_kernel_log_is_one_condition_and_ends_with_action_none(tmp_path: Path) -> None:
    health, words = open_health_at(tmp_path), {"xid": 154, "severity": "critical", "action": "reset GPU"}
    assert apply(health, event("xid", **words, detail={"to": 1})) == ["recovery_action gpu:n1.3"]
    assert apply(health, event("xid", **words, detail={"to": 0})) == []
