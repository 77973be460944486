"""Builds OTLP requests with OpenTelemetry's own classes, as a Collector sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, ResourceMetrics

T0_NS = 1_780_000_000_000_000_000
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA


def set_attributes(target: Any, attributes: Mapping[str, object]) -> None:
    """Adds attributes to a resource or a point."""
    for key, value in attributes.items():
        pair = target.attributes.add()
        pair.key = key
        kind = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(pair.value, kind, value)


class Request:
    """One request; `node` begins another resource."""

    def __init__(self, node: str = "n1", **about: object) -> None:
        self.message = ExportMetricsServiceRequest()
        self.node(node, **about)

    def node(self, node: str, **about: object) -> Request:
        self.resource: ResourceMetrics = self.message.resource_metrics.add()
        named = {"host.name": node} if node else {}
        set_attributes(self.resource.resource, {**named, **{key.replace("_", "."): v for key, v in about.items()}})
        self.scope = self.resource.scope_metrics.add()
        self.scope.scope.name = "test"
        return self

    def gauge(self, name: str, value: float | None, time: int = T0_NS, unit: str = "1", **labels: object) -> Request:
        metric = self._metric(name, unit, "gauge")
        self._number(metric.gauge, value, time, labels)
        return self

    def sum(self, name: str, value: float, time: int = T0_NS, delta: bool = False, **labels: object) -> Request:
        metric = self._metric(name, "1", "sum")
        metric.sum.aggregation_temporality, metric.sum.is_monotonic = DELTA if delta else CUMULATIVE, True
        self._number(metric.sum, value, time, labels)
        return self

    def _metric(self, name: str, unit: str, kind: str) -> Any:
        """The metric of that name, which several points share, as a Collector writes it."""
        if self.scope.metrics and self.scope.metrics[-1].name == name:
            return self.scope.metrics[-1]
        metric = self.scope.metrics.add()
        metric.name, metric.unit = name, unit
        return metric

    def _number(self, data: Any, value: float | None, time: int, labels: Mapping[str, object]) -> None:
        point = data.data_points.add()
        point.time_unix_nano, point.start_time_unix_nano = time, T0_NS - 3_600_000_000_000
        if isinstance(value, int):
            point.as_int = value
        elif value is not None:
            point.as_double = value
        else:
            point.flags = 1
        set_attributes(point, {key.replace("__", "."): label for key, label in labels.items()})

    def encode(self) -> bytes:
        return self.message.SerializeToString()


def gpu_request(node: str = "n1", time: int = T0_NS, first: float = 40.0, gpus: int = 2) -> bytes:
    """Hardware conventions of some GPUs of one node."""
    request = Request(node)
    for i in range(gpus):
        request.gauge("hw.temperature", first + i, time, "Cel", hw__id=f"gpu:{node}.{i}")
    for i in range(gpus):
        request.sum("hw.energy", 1000 + i, time, hw__id=f"gpu:{node}.{i}", hw__type="gpu")
    for i in range(gpus):
        request.gauge("vendor.thing", 0.5 + i, time, slot=str(i))
    return request.encode()
