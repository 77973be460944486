"""What the SDK collected as an ExportMetricsServiceRequest: gauges, sums and histograms with explicit bounds."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)

from agents.otlp import protobuf
from pipeline.model.signals.otel import SCHEMA


def encoded(data: MetricsData | None, resource: Mapping[str, str | bool], version: str) -> bytes:
    """The request; `resource` stands in place of the SDK's."""
    metrics = [
        protobuf.metric(metric.name, metric.description or "", metric.unit or "", _data(metric))
        for found in (data.resource_metrics if data else ())
        for scope in found.scope_metrics
        for metric in scope.metrics
    ]
    return protobuf.request(protobuf.attributes(1, resource), "fleetpulse", version, SCHEMA, metrics)


def _data(metric: Metric) -> bytes:
    data = metric.data
    if isinstance(data, Gauge):
        return protobuf.gauge(b"".join(protobuf.nested(1, _number(point)) for point in data.data_points))
    if isinstance(data, Sum):
        points = b"".join(protobuf.nested(1, _number(point)) for point in data.data_points)
        return protobuf.total(points, data.is_monotonic)
    if isinstance(data, Histogram):
        return protobuf.histogram(b"".join(protobuf.nested(1, _histogram(point)) for point in data.data_points))
    raise TypeError(f"{metric.name}: {type(data).__name__}: wanted Gauge, Sum or Histogram")


def _number(point: NumberDataPoint) -> bytes:
    """A NumberDataPoint; whole numbers as such, which all of ours that are have no sign."""
    value = point.value
    body = protobuf.fixed(6, value) if isinstance(value, int) else protobuf.double(4, value)
    times = protobuf.fixed(2, point.start_time_unix_nano or 0) + protobuf.fixed(3, point.time_unix_nano)
    return times + body + protobuf.attributes(7, _texts(point.attributes))


def _histogram(point: HistogramDataPoint) -> bytes:
    """A HistogramDataPoint."""
    return b"".join(
        (
            protobuf.fixed(2, point.start_time_unix_nano or 0),
            protobuf.fixed(3, point.time_unix_nano),
            protobuf.fixed(4, point.count),
            protobuf.double(5, point.sum),
            protobuf.packed_fixed(6, point.bucket_counts),
            protobuf.packed_doubles(7, point.explicit_bounds),
            protobuf.double(11, point.min),
            protobuf.double(12, point.max),
            protobuf.attributes(9, _texts(point.attributes)),
        )
    )


def _texts(attributes: Mapping[str, object] | None) -> dict[str, str | bool]:
    return {key: str(value) for key, value in (attributes or {}).items()}
