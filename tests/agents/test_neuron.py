"""The collector `neuron`, on a program that prints recorded documents of neuron-monitor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.accelerators import neuron
from agents.collectors.accelerators.neuron import Neuron
from agents.node.batches import build_blocks, check_reading
from tests.agents.bindings import FIXTURES, pci

DOCUMENTS = (FIXTURES / "neuron_trn1.jsonl").read_bytes().splitlines()
BOUND_S = 10.0
PROGRAM = """#!{python}
import os, sys, time
assert sys.argv[1] == "-c" and os.path.exists(sys.argv[2])
open({pids!r}, "a").write(f"{{os.getpid()}}\\n")
lines = open({lines!r}, "rb").read()
{body}
"""
ONCE_THEN_WAIT = "os.write(1, lines)\ntime.sleep(60)"
Make = Callable[..., Neuron]


@pytest.fixture
def make_collector(tmp_path: Path) -> Iterator[Make]:
    """Returns a function that opens a collector whose program prints `lines` and runs `body`."""
    collectors = []

    def make(lines: bytes, body: str = ONCE_THEN_WAIT, **settings: Any) -> Neuron:
        program, kept, pids = (tmp_path / name for name in ("neuron-monitor", "lines", "pids"))
        kept.write_bytes(lines)
        text = PROGRAM.format(python=sys.executable, lines=str(kept), pids=str(pids), body=body)
        program.write_text(text)
        program.chmod(0o755)
        (tmp_path / "neuron0").touch()
        bus = tmp_path / "pci"
        root = bus if bus.exists() else pci(tmp_path, ("0x1d0f", "0x120000", "0x7164"))
        collector = Neuron(command=str(program), device=tmp_path / "neuron0", pci=root, **settings)
        collector.open("n1")
        collectors.append(collector)
        return collector

    yield make
    for collector in collectors:
        collector.close()


def wait_for_readings(collector: Neuron, good: Callable[[tuple[Reading, ...]], bool] = bool) -> tuple[Reading, ...]:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        if good(found := collector.read()):
            return found
        time.sleep(0.01)
    pytest.fail("no document came")


def pids(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- documents -------------------------------------------------------------------------------------------------------


def test_a_document_is_read_by_device_and_core(make_collector: Make) -> None:
    collector = make_collector(DOCUMENTS[1] + b"\n")
    collector._now = lambda: 123
    devices, cores = wait_for_readings(collector)
    assert devices.entities == ("gpu:n1.0", "gpu:n1.1")
    columns = {name: values.tolist() for name, values in devices.columns.items()}
    assert columns["gpu.utilization"] == pytest.approx([0.805, 0.41])
    assert columns["gpu.memory_used"] == [6 * 2**30, 3 * 2**30]
    assert columns["gpu.memory_total"] == [34359738368] * 2
    assert columns["gpu.dram_corrected"] == [6, 7]
    assert columns["gpu.dram_uncorrected"] == [0, 1]
    assert columns["gpu.sram_corrected"] == [2, 2]
    assert columns["gpu.ecc_corrected"] == [8, 9]
    assert columns["gpu.executions"] == [100, 100]
    assert columns["gpu.execution_errors"] == [0, 0.6]
    assert columns["gpu.execution_latency"] == [0.0102, 0.0204]
    assert columns["gpu.execution_latency_p99"] == [0.0111, 0.0222]
    assert cores.entities == tuple(f"neuroncore:n1.{d}.{c}" for d in (0, 1) for c in (0, 1))
    assert cores.columns["neuroncore.utilization"].tolist() == pytest.approx([0.80, 0.81, 0.82, 0])
    assert cores.columns["neuroncore.memory_used"].tolist() == [3 * 2**30] * 3 + [0]
    assert cores.columns["neuroncore.flops"][:3].tolist() == [1e12, 2e12, 3e12]
    assert {*devices.columns, *cores.columns} == set(collector.signals)
    (event,) = devices.events
    assert (event.time, event.entity, event.kind) == (123, "node:n1", "execution_errors")
    failed = {"pid": 4377, "tag": "train_b", "period": 5.0, "devices": ["gpu:n1.1"], "errors": {"transient": 3}}
    assert dict(event.data) == failed
    assert collector.read() == ()  # each document once
    inventory = collector.inventory()
    assert inventory.keys() == {*devices.entities, *cores.entities}
    assert inventory["neuroncore:n1.1.0"].parents == ("gpu:n1.1", "node:n1")
    assert inventory["gpu:n1.0"].attributes["sku"] == "trainium"
    assert inventory["gpu:n1.0"].attributes["instance_type"] == "trn1.32xlarge"
    check_reading(devices, inventory)
    assert len(build_blocks([devices, cores])) == 2


def test_a_core_without_a_program_has_use_zero() -> None:
    report = neuron.parse_report(DOCUMENTS[0])
    assert [report.devices[d]["gpu.utilization"] for d in (0, 1)] == [0, 0]
    assert report.failures == []
    assert "gpu.execution_latency" not in report.devices[0]


def test_joined_cores_of_a_trn2_belong_to_the_right_device() -> None:
    document = json.loads(DOCUMENTS[1])
    hardware = document["neuron_hardware_info"]
    hardware |= {"neuron_device_type": "trainium2", "neuroncore_per_device_count": 8, "logical_neuroncore_config": 2}
    use = {"3": {"neuroncore_utilization": 40, "v3d": {"nc_v3.6": {}}}, "4": {"neuroncore_utilization": 90}}
    document["neuron_runtime_data"][0]["report"]["neuroncore_counters"]["neuroncores_in_use"] = use
    report = neuron.parse_report(json.dumps(document).encode())
    assert report.cores[0, 3]["neuroncore.utilization"] == pytest.approx(0.4)
    assert report.cores[1, 0]["neuroncore.utilization"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        DOCUMENTS[1][:-300],
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b"1" * 5000,
    ],
)
def test_an_invalid_document_raises_a_value_error(broken: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's message
        neuron.parse_report(broken)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(found: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield from paths(value, (*before, key))


PATHS = [path for path in paths(json.loads(DOCUMENTS[1])) if path]


@given(st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=4))
def test_any_value_at_any_place_of_a_document_is_read_without_error(changes: list[tuple[Any, Any]]) -> None:
    document: Any = json.loads(DOCUMENTS[1])
    for path, value in changes:
        place = document
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
        except (KeyError, IndexError, TypeError):  # an earlier change removed the place
            continue
    report = neuron.parse_report(json.dumps(document).encode())
    assert len(report.devices) <= neuron.MAX_DEVICES
    assert len(report.cores) <= neuron.MAX_CORES


# --- the child -------------------------------------------------------------------------------------------------------


def test_without_a_device_or_the_program_there_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="neuron0 is missing"):
        Neuron(device=tmp_path / "neuron0").open("n1")
    (tmp_path / "neuron0").touch()
    with pytest.raises(NoData, match=r"found a Neuron device, but no .*neuron-monitor: install aws-neuronx-tools"):
        Neuron(device=tmp_path / "neuron0", command=str(tmp_path / "neuron-monitor")).open("n1")


def test_the_configuration_file_requests_the_groups_and_is_removed_at_close(make_collector: Make) -> None:
    collector = make_collector(b"", period=7)
    config = Path(collector._config)
    asked = json.loads(config.read_text())
    assert asked["period"] == "7s"
    assert [group["type"] for group in asked["system_metrics"]] == ["neuron_hw_counters"]
    assert {group["type"] for group in asked["neuron_runtimes"][0]["metrics"]} == {
        *("neuroncore_counters", "memory_used", "execution_stats")
    }
    collector.close()
    assert not config.exists()


def test_closing_ends_the_child_by_its_id(make_collector: Make, tmp_path: Path) -> None:
    collector = make_collector(DOCUMENTS[0] + b"\n")
    wait_for_readings(collector)
    (pid,) = pids(tmp_path)
    assert is_alive(pid)
    collector.close()
    assert not is_alive(pid)
    collector.close()


@pytest.mark.slow
def test_a_child_that_dies_is_started_again(make_collector: Make, tmp_path: Path) -> None:
    collector = make_collector(DOCUMENTS[0] + b"\n", "os.write(1, lines)")
    wait_for_readings(collector)
    wait_for_readings(collector)
    assert len(pids(tmp_path)) >= 2


def test_only_the_newest_of_many_documents_is_read(make_collector: Make) -> None:
    body = "os.write(1, lines)\nfor _ in range(300): sys.stdout.buffer.write(lines)\nsys.stdout.flush(); time.sleep(60)"
    collector = make_collector(b"\n".join([*DOCUMENTS, b""]), body)
    wait_for_readings(collector, lambda found: bool(found) and found[0].columns["gpu.dram_corrected"][0] == 6)


def test_an_incomplete_line_is_skipped(make_collector: Make) -> None:
    body = "os.write(1, lines[:500] + b'\\n')\ntime.sleep(.2)\nos.write(1, lines)\ntime.sleep(60)"
    collector = make_collector(DOCUMENTS[0] + b"\n", body)
    assert wait_for_readings(collector)[0].entities == ("gpu:n1.0", "gpu:n1.1")


def test_an_endless_line_ends_the_program(
    make_collector: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron, "MAX_LINE_BYTES", 100_000)
    monkeypatch.setattr(neuron, "MIN_PAUSE_S", 0.05)
    body = "while True: os.write(1, b'x' * 50000)"
    collector = make_collector(b"", body)
    message = fault_text_now(collector)
    assert "wrote a line of more than 100000 bytes" in message
    assert len(pids(tmp_path)) >= 1


def test_silence_becomes_a_fault_with_its_cause(make_collector: Make) -> None:
    assert "wrote nothing for 0.3 s" in fault_text(make_collector(b"", "time.sleep(60)", silence=0.3))


def test_empty_lines_count_as_silence(make_collector: Make) -> None:
    assert "wrote nothing for 0.3 s" in fault_text(
        make_collector(b"", "while True: os.write(1, b'\\n'); time.sleep(.01)", silence=0.3)
    )


def test_a_crash_becomes_a_fault_with_its_cause(make_collector: Make) -> None:
    assert "ended with status 3" in fault_text_now(make_collector(b"", "sys.exit(3)"))


def test_garbage_becomes_a_fault_with_its_cause(make_collector: Make) -> None:
    collector = make_collector(b"no json\n", "while True: os.write(1, lines); time.sleep(.02)")
    assert "neuron-monitor wrote an invalid document" in fault_text_now(collector)


def fault_text_now(collector: Neuron) -> str:
    """Returns the fault, as if the last document were long ago."""
    collector._last_report -= 2 * collector.silence
    return fault_text(collector)


def fault_text(collector: Neuron) -> str:
    with pytest.raises(RuntimeError) as fault:
        wait_for_readings(collector, lambda found: False)
    return str(fault.value)


def test_names_differ_on_a_node_with_two_vendors(make_collector: Make, tmp_path: Path) -> None:
    pci(tmp_path, ("0x10de", "0x030200", "0x2330"), ("0x1d0f", "0x120000", "0x7164"))
    collector = make_collector(DOCUMENTS[0] + b"\n")
    devices, cores = wait_for_readings(collector)
    assert devices.entities == ("gpu:n1.neuron0", "gpu:n1.neuron1")
    assert cores.entities[0] == "neuroncore:n1.neuron0.0"
