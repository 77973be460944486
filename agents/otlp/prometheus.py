"""What the SDK collected in Prometheus' text format 0.0.4, on a port of loopback.

Names as the OpenTelemetry specification maps them: dots become underscores, the unit and `_total` are added.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.sdk.metrics.export import Histogram, HistogramDataPoint, Metric, MetricsData, NumberDataPoint, Sum

from pipeline.model.errors import ConfigError

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNITS = {"s": "seconds", "By": "bytes"}


class Exposition:
    """Serves `/metrics` on 127.0.0.1. Raises ConfigError if the port cannot be had."""

    def __init__(self, port: int, collect: Callable[[], MetricsData | None]) -> None:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, status = (render(collect()).encode(), 200) if self.path == "/metrics" else (b"/metrics\n", 404)
                self.send_response(status)
                self.send_header("Content-Type", MEDIA_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing: a scrape is no news."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Page)
        except OSError as error:
            raise ConfigError(
                f"[opentelemetry] prometheus_port = {port}: {error.strerror}; wanted a port that is free on 127.0.0.1"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def render(data: MetricsData | None) -> str:
    """All metrics, each with HELP and TYPE."""
    lines: list[str] = []
    for found in data.resource_metrics if data else ():
        for scope in found.scope_metrics:
            for metric in scope.metrics:
                lines += _family(metric)
    return "\n".join(lines) + "\n"


def _family(metric: Metric) -> Iterator[str]:
    data, unit = metric.data, _UNITS.get(metric.unit or "", "")
    name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name) + (f"_{unit}" if unit else "")
    monotonic = isinstance(data, Sum) and data.is_monotonic
    name += "_total" if monotonic else ""
    kind = "counter" if monotonic else "histogram" if isinstance(data, Histogram) else "gauge"
    yield f"# HELP {name} {metric.description}"
    yield f"# TYPE {name} {kind}"
    for point in data.data_points:
        if isinstance(point, HistogramDataPoint):
            yield from _buckets(name, point)
        elif isinstance(point, NumberDataPoint):
            yield f"{name}{_labels(point.attributes)} {_number(point.value)}"


def _buckets(name: str, point: HistogramDataPoint) -> Iterator[str]:
    below = 0
    for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
        below += count
        label = "+Inf" if bound == float("inf") else _number(bound)
        yield f"{name}_bucket{_labels(point.attributes, le=label)} {below}"
    yield f"{name}_sum{_labels(point.attributes)} {_number(point.sum)}"
    yield f"{name}_count{_labels(point.attributes)} {point.count}"


def _labels(attributes: Mapping[str, object] | None, **more: str) -> str:
    pairs = {**{key.replace(".", "_"): str(value) for key, value in (attributes or {}).items()}, **more}
    texts = (f'{key}="{_escaped(value)}"' for key, value in pairs.items())
    return "{" + ",".join(texts) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value).removesuffix(".0")
