"""The collector `tpu`, against a real grpcio server with the messages of libtpu's metric service."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.accelerators import tpu
from agents.collectors.accelerators.tpu import Tpu
from agents.node.batches import check_reading
from agents.protobuf import MalformedMessage
from tests.agents.bindings import pci

V5E = ("0x1ae0", "0x120000", "0x0063")
GIB = 2**30

# --- tpu.monitoring.runtime: name, number and type of the fields that are used; a capital is a message ---------------

SCHEMA: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Gauge": (("as_double", 1, "double"), ("as_int", 2, "int64"), ("as_string", 3, "string"), ("as_bool", 4, "bool")),
    "AttrValue": (("string_attr", 1, "string"), ("int_attr", 3, "int64"), ("kvlist_attr", 6, "KeyValueList")),
    "KeyValueList": (("attributes", 1, "*Attribute"),),
    "Attribute": (("key", 1, "string"), ("value", 2, "AttrValue")),
    "Timestamp": (("seconds", 1, "int64"), ("nanos", 2, "int32")),
    "Metric": (("attribute", 1, "Attribute"), ("timestamp", 2, "Timestamp"), ("gauge", 3, "Gauge")),
    "TPUMetric": (("name", 1, "string"), ("description", 2, "string"), ("metrics", 3, "*Metric")),
    "MetricRequest": (("metric_name", 1, "string"), ("skip_node_aggregation", 2, "bool")),
    "MetricResponse": (("metric", 1, "TPUMetric"),),
    "ListSupportedMetricsRequest": (("filter", 1, "string"),),
    "SupportedMetric": (("metric_name", 1, "string"),),
    "ListSupportedMetricsResponse": (("supported_metric", 1, "*SupportedMetric"),),
}
ONE_OF = ("Gauge", "AttrValue")
PACKAGE = "tpu.monitoring.runtime"


def schema() -> dict[str, Any]:
    """Returns classes of the real protobuf library for the messages above."""
    file = descriptor_pb2.FileDescriptorProto(name="tpu_metric_service.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, listed in SCHEMA.items():
        made = file.message_type.add(name=message)
        if message in ONE_OF:
            made.oneof_decl.add(name="one")
        for name, number, kind in listed:
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label)
            kind = kind.removeprefix("*")
            field.type = kinds.TYPE_MESSAGE if kind in SCHEMA else getattr(kinds, f"TYPE_{kind.upper()}")
            if message in ONE_OF:
                field.oneof_index = 0  # so that zeros are written, too
            if kind in SCHEMA:
                field.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


PB = schema()


class Libtpu(grpc.GenericRpcHandler):
    """The metrics of libtpu: metric -> device -> value. Newer versions name the device in a list, and as text."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {
            tpu.MEMORY_TOTAL: dict.fromkeys(range(4), 16 * GIB),
            tpu.MEMORY_USED: {d: (d + 1) * GIB for d in range(4)},
            tpu.DUTY_CYCLE: {d: 25.0 * (d + 1) for d in range(4)},
            tpu.QUEUE_SIZE: {d: d for d in range(4)},
            "hlo.execution.timing.distribution.microseconds": {},
        }
        self.lists = True
        self.hangs = threading.Event()
        self.hangs.set()
        self.asked: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.removeprefix(f"/{PACKAGE}.RuntimeMetricService/")
        if name == "GetRuntimeMetric":
            return self._handler(self.metric, "MetricRequest")
        if name == "ListSupportedMetrics" and self.lists:
            return self._handler(self.listed, "ListSupportedMetricsRequest")
        return None

    def _handler(self, answer: Callable[..., Any], request: str) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(answer, PB[request].FromString, lambda m: m.SerializeToString())

    def listed(self, request: Any, context: grpc.ServicerContext) -> Any:
        found = PB["ListSupportedMetricsResponse"]()
        for name in self.values:
            found.supported_metric.add(metric_name=name)
        return found

    def metric(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.hangs.wait(20)
        self.asked.append(request.metric_name)
        if request.metric_name not in self.values:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such metric")
        found = PB["MetricResponse"]()
        found.metric.name = request.metric_name
        for device, value in reversed(self.values[request.metric_name].items()):
            one = found.metric.metrics.add()
            one.timestamp.seconds = 1_800_000_000
            one.attribute.key = "device-id"
            if request.metric_name == tpu.QUEUE_SIZE:
                inner = one.attribute.value.kvlist_attr.attributes
                inner.add(key="core_type").value.string_attr = "TENSOR_CORE"
                inner.add(key="device_ordinal").value.string_attr = str(device)
            else:
                one.attribute.value.int_attr = device
            if isinstance(value, int):
                one.gauge.as_int = value
            else:
                one.gauge.as_double = value
        return found


@pytest.fixture
def libtpu() -> Iterator[tuple[Libtpu, str, grpc.Server]]:
    made = Libtpu()
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((made,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}", server
    made.hangs.set()
    server.stop(0).wait()


def opened(tmp_path: Path, address: str, chips: int = 4, **settings: Any) -> tuple[Tpu, Callable[[], Any]]:
    """Returns the collector, and a function that reads at the next due time."""
    collector = Tpu(address=address, pci=pci(tmp_path, *[V5E] * chips), **settings)
    collector.open("n1")
    clock = [1_800_000_000_000_000]
    collector._rhythm._now = lambda: clock[0]

    def read_once() -> Any:
        clock[0] += 10_000_000
        return collector.read()

    return collector, read_once


def test_without_a_chip_there_is_no_data_and_nothing_is_loaded(tmp_path: Path) -> None:
    gvnic = ("0x1ae0", "0x020000", "0x0042")
    with pytest.raises(NoData, match="no TPU"):
        Tpu(pci=pci(tmp_path, gvnic)).open("n1")


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=r"\[collector.tpu\] address: .*another machine, and the call"):
        opened(tmp_path, "192.0.2.7:8431")


def test_the_metrics_of_each_device_are_read(tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]) -> None:
    collector, read_once = opened(tmp_path, libtpu[1])
    (reading,) = read_once()
    assert reading.entities == tuple(f"gpu:n1.{d}" for d in range(4))
    columns = {name: values.tolist() for name, values in reading.columns.items()}
    assert columns == {
        "gpu.memory_total": [16 * GIB] * 4,
        "gpu.memory_used": [GIB, 2 * GIB, 3 * GIB, 4 * GIB],
        "gpu.utilization": [0.25, 0.5, 0.75, 1.0],
        "gpu.queued_programs": [0, 1, 2, 3],
    }
    assert set(columns) == set(collector.signals)
    inventory = collector.inventory()
    assert inventory.keys() == set(reading.entities)
    check_reading(reading, inventory)
    assert inventory["gpu:n1.2"].attributes == {"vendor": "Google", "sku": "TPU v5e", "pci": "0000:12:00.0"}
    assert collector.read() == ()  # not due


def test_the_duty_cycle_of_a_chip_is_reported_for_both_devices(
    tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]
) -> None:
    libtpu[0].values[tpu.DUTY_CYCLE] = {0: 30.0, 1: 90.0}
    collector, read_once = opened(tmp_path, libtpu[1], chips=2)
    (reading,) = read_once()
    assert reading.columns["gpu.utilization"].tolist() == pytest.approx([0.3, 0.3, 0.9, 0.9])
    assert [collector.inventory()[f"gpu:n1.{d}"].attributes["pci"][5:7] for d in range(4)] == ["10", "10", "11", "11"]


def test_an_old_libtpu_without_a_list_is_read_for_the_basic_metrics(
    tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]
) -> None:
    libtpu[0].lists = False
    _, read_once = opened(tmp_path, libtpu[1])
    (reading,) = read_once()
    assert libtpu[0].asked == [tpu.MEMORY_TOTAL, tpu.MEMORY_USED, tpu.DUTY_CYCLE]
    assert np.isnan(reading.columns["gpu.queued_programs"]).all()


def test_between_two_programs_nothing_is_measured_and_no_library_is_loaded(
    tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "h2"]:
        monkeypatch.delitem(sys.modules, name)
    libtpu[2].stop(0).wait()
    collector, read_once = opened(tmp_path, libtpu[1])
    assert read_once() == ()
    assert collector.inventory() == {}
    assert "h2.connection" not in sys.modules


def test_a_device_that_is_no_longer_reported_keeps_its_number(
    tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]
) -> None:
    _, read_once = opened(tmp_path, libtpu[1])
    read_once()
    for values in libtpu[0].values.values():
        values.pop(1, None)
    (reading,) = read_once()
    assert reading.entities == tuple(f"gpu:n1.{d}" for d in range(4))
    assert np.isnan(reading.columns["gpu.memory_used"][1])
    assert reading.columns["gpu.memory_used"][2] == 3 * GIB


def test_a_hung_libtpu_is_a_fault_within_the_timeout(tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]) -> None:
    libtpu[0].hangs.clear()
    _, read_once = opened(tmp_path, libtpu[1], timeout=0.3)
    with pytest.raises(RuntimeError, match=r"libtpu does not respond: .*DEADLINE_EXCEEDED"):
        read_once()


def test_many_devices_are_bounded(tmp_path: Path, libtpu: tuple[Libtpu, str, grpc.Server]) -> None:
    libtpu[0].values[tpu.MEMORY_USED] = dict.fromkeys(range(500), 1)
    _, read_once = opened(tmp_path, libtpu[1])
    assert len(read_once()[0].entities) == tpu.MAX_DEVICES


@given(st.binary(max_size=200))
def test_no_answer_breaks_the_reader(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        tpu.read_metric(lambda method, request: data, tpu.MEMORY_USED)
    with contextlib.suppress(MalformedMessage):
        tpu.list_supported_metrics(lambda method, request: data)


@given(st.dictionaries(st.sampled_from(list(tpu.SIGNALS)), st.dictionaries(st.integers(0, 9), st.floats(), max_size=9)))
def test_any_device_numbers_are_kept_apart(found: dict[str, dict[int, float]]) -> None:
    reported = {device for values in found.values() for device in values}
    assert tpu.group_by_device(found).keys() <= reported
