"""Telemetry as OTLP: OpenTelemetry's own classes read the batch's values, under the conventions' names."""

from __future__ import annotations

import math
import time as clock_time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from agents.collector import Device
from agents.otlp import messages
from agents.otlp.export import MAX_LAYOUTS, TelemetryExport
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.model.signals import CATALOGUE, otel, signals_of_class
from tests.examples import examples

ORIGIN = Origin("dc1", "n1", bytes(16))
T0 = 1_767_225_600 * SECOND
GPUS = tuple(f"gpu:n1.{i}" for i in range(2))
MISSING = 2**64 - 1

Points = dict[tuple[str, str, tuple[tuple[str, str], ...]], Any]


def batch(time: int, *blocks: Block, origin: Origin = ORIGIN) -> Batch:
    return Batch(origin, np.array([time], np.int64), blocks)


def gpus(**columns: list[float]) -> Block:
    made = {f"gpu.{n}": np.array([v], CATALOGUE[f"gpu.{n}"].type) for n, v in columns.items()}
    return Block("gpu", GPUS, made)


def requests(*batches: Batch, interval: float = 1.0, devices: Mapping[str, Device] | None = None) -> list[Any]:
    """Returns the decoded requests of an export of these batches."""
    sent: list[bytes] = []
    export = TelemetryExport(batches[0].origin, "1.2", interval, [sent.append])
    export.set_devices(devices or {})
    for one in batches:
        export.add_batch(one)
    return [ExportMetricsServiceRequest.FromString(request) for request in sent]


def walk_metrics(request: Any) -> Iterator[tuple[Any, Any]]:
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            yield metric, point


def facts(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def points(request: Any, *keys: str) -> dict[tuple[Any, ...], Any]:
    """Returns (metric, entity, further attributes) -> point."""
    found = {}
    for metric, point in walk_metrics(request):
        reported = facts(point.attributes)
        entity = reported.get("hw.id") or reported["fleetpulse.entity"]
        found[(metric.name, entity, *(reported.get(key) for key in keys))] = point
    return found


# --- names, units, values --------------------------------------------------------------------------------------------


def test_a_batch_arrives_with_the_names_units_and_values_of_the_conventions() -> None:
    block = gpus(utilization=[0.5, 1], energy=[1500, 2500], memory_used=[1e9, 2e9])
    (request,) = requests(batch(T0, block), devices={GPUS[1]: Device(("node:n1",))})
    metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
    assert {name: m.unit for name, m in metrics.items()} == {
        "hw.gpu.utilization": "1",
        "hw.energy": "J",
        "hw.gpu.memory.usage": "By",
    }
    assert metrics["hw.energy"].sum.is_monotonic
    assert metrics["hw.energy"].sum.aggregation_temporality == 2
    assert not metrics["hw.gpu.memory.usage"].sum.is_monotonic
    assert metrics["hw.gpu.utilization"].WhichOneof("data") == "gauge"
    found = points(request)
    assert [found["hw.energy", gpu].as_double for gpu in GPUS] == [1.5, 2.5]
    assert all(point.time_unix_nano == T0 * 1000 for point in found.values())
    assert facts(found["hw.energy", GPUS[0]].attributes) == {"hw.id": GPUS[0], "hw.name": "n1.0", "hw.type": "gpu"}
    assert facts(found["hw.energy", GPUS[1]].attributes)["hw.parent"] == "node:n1"


def test_the_resource_names_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=w7,host.name=other,nonsense")
    simulated = Origin("dc1", "n1", bytes(16), simulated=True)
    (request,) = requests(batch(T0, gpus(power=[1, 2]), origin=simulated))
    reported = facts(request.resource_metrics[0].resource.attributes)
    assert request.resource_metrics[0].schema_url == otel.SCHEMA
    wanted = {"service.name": "fleetpulse-agent", "service.namespace": "dc1", "host.name": "n1", "host.id": "n1"}
    assert wanted.items() <= reported.items()
    assert (reported["k8s.node.name"], reported["fleetpulse.simulated"], reported["service.version"]) == (
        "w7",
        True,
        "1.2",
    )


def test_counters_in_the_conventions_unit_are_exact_integers() -> None:
    (request,) = requests(batch(T0, gpus(ecc_corrected=[2**63 - 1, 2**53 + 1])))
    found = points(request)
    assert [found["hw.errors", gpu].as_int for gpu in GPUS] == [2**63 - 1, 2**53 + 1]


@pytest.mark.parametrize("value", [MISSING, 2**63])
def test_missing_and_unrepresentable_values_are_points_without_a_value(value: int) -> None:
    (request,) = requests(batch(T0, gpus(ecc_corrected=[value, 5], power=[math.nan, 7], energy=[MISSING, 1])))
    found = points(request)
    for name in ("hw.errors", "hw.power", "hw.energy"):
        assert [found[name, gpu].flags for gpu in GPUS] == [1, 0]
    assert (found["hw.errors", GPUS[0]].as_int, found["hw.power", GPUS[0]].as_double) == (0, 0)


def test_a_signal_without_any_value_is_left_out() -> None:
    (request,) = requests(batch(T0, gpus(power=[1, 2], energy=[MISSING, MISSING])))
    assert {name for name, _ in points(request)} == {"hw.power"}


def test_a_state_is_one_if_active_and_zero_if_not() -> None:
    ports = tuple(f"port:n1.p{i}" for i in range(3))
    (request,) = requests(batch(T0, Block("nic", ports, {"nic.state": np.array([[1, 0, 255]], np.uint8)})))
    found = points(request)
    assert [found["hw.network.up", port].as_double for port in ports] == [1, 0, 0]
    assert [found["hw.network.up", port].flags for port in ports] == [0, 0, 1]
    states = CATALOGUE["disk.state"].states
    disks = ("disk:n1.d0", "disk:n1.d1")
    values = np.array([[states.index("live"), states.index("dead")]], np.uint8)
    (request,) = requests(batch(T0, Block("disk", disks, {"disk.state": values})))
    shown = {(e, s): p.as_double for (n, e, s), p in points(request, "hw.state").items() if n == "hw.status"}
    assert [shown[disks[0], s] for s in ("ok", "degraded", "failed")] == [1, 0, 0]
    assert [shown[disks[1], s] for s in ("ok", "degraded", "failed")] == [0, 0, 1]


def test_the_remaining_life_of_a_disk_is_never_negative() -> None:
    used = np.array([[0.25, 1.5]], np.float32)
    (request,) = requests(batch(T0, Block("disk", ("disk:n1.a", "disk:n1.b"), {"disk.endurance_used": used})))
    assert sorted(point.as_double for point in points(request).values()) == [0, 0.75]


def test_counters_have_a_start_time_and_gauges_do_not() -> None:
    block = gpus(energy=[1, 2], power=[3, 4], generation=[1_767_000_000, 2**32 - 1])
    (request,) = requests(batch(T0, block))
    found = points(request)
    assert [found["hw.energy", gpu].start_time_unix_nano for gpu in GPUS] == [1_767_000_000 * 10**9, 0]
    assert found["hw.power", GPUS[0]].start_time_unix_nano == 0
    assert not any("generation" in name for name, _ in found)


# --- intervals -------------------------------------------------------------------------------------------------------


def test_a_request_has_the_newest_values_since_the_last_request() -> None:
    ticks = [batch(T0 + i * SECOND, gpus(power=[i, i])) for i in range(11)]
    ticks[3] = batch(T0 + 3 * SECOND, gpus(power=[3, 3], energy=[3000, 3000]))
    first, second = requests(*ticks, interval=10.0)
    assert points(first).keys() == {("hw.power", gpu) for gpu in GPUS}
    found = points(second)
    assert found["hw.power", GPUS[0]].as_double == 10
    assert (found["hw.energy", GPUS[0]].as_double, found["hw.energy", GPUS[0]].time_unix_nano) == (
        3,
        (T0 + 3 * SECOND) * 1000,
    )


def test_layouts_change_with_the_devices_and_few_are_kept() -> None:
    sent: list[bytes] = []
    export = TelemetryExport(ORIGIN, "1", 1.0, [sent.append])
    for i in range(3 * MAX_LAYOUTS):
        names = tuple(f"gpu:n1.{j}" for j in range(i % 7 + 1))
        export.add_batch(
            batch(T0 + i * SECOND, Block("gpu", names, {"gpu.power": np.full((1, len(names)), i, np.float32)}))
        )
        found = points(ExportMetricsServiceRequest.FromString(sent[-1]))
        assert {(e, p.as_double) for (_, e), p in found.items()} == {(name, i) for name in names}
    assert len(export._layouts) == MAX_LAYOUTS


wires = st.sampled_from([s for s in CATALOGUE.values() if s.device_class in ("gpu", "nic", "disk", "node", "dimm")])


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_signals_and_values_decode_unchanged(data: st.DataObject) -> None:
    signals = data.draw(st.lists(wires, min_size=1, max_size=12, unique_by=lambda s: s.name))
    blocks, wanted = [], {}
    for device_class in dict.fromkeys(s.device_class for s in signals):
        mine = [s for s in signals if s.device_class == device_class and not s.name.endswith(".generation")]
        columns = {}
        for signal in mine:
            bits = data.draw(st.lists(st.integers(0, MISSING), min_size=3, max_size=3))
            columns[signal.name] = (
                np.array([bits], np.uint64).view(np.uint8)[:, : 3 * np.dtype(signal.type).itemsize].view(signal.type)
            )
            wanted[signal.name] = columns[signal.name][0]
        blocks.append(Block(device_class, tuple(f"{device_class}:n1.{i}" for i in range(3)), columns))
    with np.errstate(all="ignore"):
        found = requests(batch(T0, *blocks))
    for request in found:
        for metric, point in walk_metrics(request):
            if metric.name.startswith("fleetpulse.") and not point.flags:
                values = wanted[metric.name.removeprefix("fleetpulse.")]
                reported = getattr(point, point.WhichOneof("value"))
                assert any(reported == pytest.approx(float(v), nan_ok=True) for v in values)


# --- protobuf --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1))
def test_encoded_numbers_are_decoded_by_protobuf(value: int) -> None:
    answer = messages.encode_nested(1, messages.encode_unsigned(1, value % 2**63) + messages.encode_text(2, "why"))
    found = ExportMetricsServiceResponse.FromString(answer)
    assert (found.partial_success.rejected_data_points, found.partial_success.error_message) == (value % 2**63, "why")
    assert messages.decode_rejected(found.SerializeToString()) == (value % 2**63, "why")


@given(st.binary(max_size=60))
def test_any_bytes_of_an_answer_are_decoded_or_refused(answer: bytes) -> None:
    try:
        messages.decode_rejected(answer)
    except ValueError:
        return


def test_an_empty_answer_refuses_nothing() -> None:
    assert messages.decode_rejected(b"") == (0, "")
    empty = ExportMetricsServiceResponse(partial_success=ExportMetricsPartialSuccess())
    assert messages.decode_rejected(empty.SerializeToString()) == (0, "")


def test_protobuf_rejects_truncated_requests() -> None:
    sent: list[bytes] = []
    export = TelemetryExport(ORIGIN, "1", 1.0, [sent.append])
    export.add_batch(batch(T0, gpus(power=[1, 2])))
    with pytest.raises(DecodeError):
        ExportMetricsServiceRequest.FromString(sent[0][:-3])


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_filled_template_costs_a_fraction_of_a_built_request() -> None:
    names = tuple(f"gpu:n1.{i}" for i in range(8))
    signals = [s for s in signals_of_class("gpu") if not s.states and s.name != "gpu.generation"]
    columns = {s.name: np.ones((1, 8), s.type) for s in signals}
    sent: list[bytes] = []
    export = TelemetryExport(ORIGIN, "1", 1.0, [sent.append])
    stamped = min(
        took(lambda i=i: export.add_batch(batch(T0 + i * SECOND, Block("gpu", names, columns)))) for i in range(20)
    )
    message = ExportMetricsServiceRequest.FromString(sent[-1])
    built = min(took(lambda: rebuilt(message).SerializeToString()) for _ in range(5))
    assert stamped < built / 3


def took(act: Any) -> float:
    began = clock_time.perf_counter()
    act()
    return clock_time.perf_counter() - began


def rebuilt(message: Any) -> Any:
    """Returns the same request built by the generated classes, point by point, as an exporter does."""
    fresh = ExportMetricsServiceRequest()
    scope = fresh.resource_metrics.add().scope_metrics.add()
    for metric in message.resource_metrics[0].scope_metrics[0].metrics:
        made = scope.metrics.add(name=metric.name, unit=metric.unit)
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            other = getattr(made, kind).data_points.add(time_unix_nano=point.time_unix_nano)
            other.as_double = point.as_double
            for attribute in point.attributes:
                one = other.attributes.add(key=attribute.key)
                one.value.string_value = attribute.value.string_value
    return fresh
