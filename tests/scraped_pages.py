"""Pages that a real Prometheus scrapes in tests: dcgm-exporter's shape, an application, and a real node_exporter.

Every page has the gauge `page_number`, so that the rows of one time are compared with the page of that scrape.
The dcgm-exporter page is our own, in the exporter's documented format (labels, names, units of its default counters).
"""

from __future__ import annotations

import http.server
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from agents.protobuf import encode_double, encode_nested, encode_text, encode_unsigned

Series = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels, as scraped."""
PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
TEXT = "text/plain; version=0.0.4"
COUNTER, GAUGE, SUMMARY, HISTOGRAM = 0, 1, 2, 4
"""io.prometheus.client.MetricType."""
ENDS_AFTER = 3
"""Page from which on the gauge `app_ends` is missing: Prometheus writes a staleness marker."""
BACK_MS = 300, 1800
"""How far `app_late` is behind on odd and even pages, of scrapes each second: on even ones older than on the last."""


class Pages:
    """An HTTP server with the pages /dcgm, /app and /node. Keeps what it served.

    served: page -> number -> series -> value.
    """

    def __init__(self, node_exporter: str) -> None:
        self.served: dict[str, dict[int, dict[Series, float]]] = defaultdict(dict)
        self.late: dict[int, float] = {}  # time (ms) -> value of app_late
        self._node_exporter, self._lock = node_exporter, threading.Lock()
        pages = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, body = pages.make(self.path.strip("/"))
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make(self, page: str) -> tuple[str, bytes]:
        """(Content-Type, body) of the next page of a kind."""
        with self._lock:
            number = len(self.served[page]) + 1
            series: dict[Series, float] = {("page_number", frozenset()): float(number)}
            if page == "app":
                body = make_application(number, series, self.late)
            else:
                text = make_dcgm(number) if page == "dcgm" else self._fetch_node_exporter()
                body = f"{text}# TYPE page_number gauge\npage_number {number}\n".encode()
                for family in text_string_to_metric_families(text):
                    series |= {(s.name, frozenset(s.labels.items())): s.value for s in family.samples}
            self.served[page][number] = series
        return (PROTOBUF if page == "app" else TEXT), body

    def _fetch_node_exporter(self) -> str:
        with urllib.request.urlopen(self._node_exporter, timeout=10) as answer:
            return str(answer.read().decode())


# name: (type, value of GPU i on page n); as dcgm-exporter's default counters
DCGM: Mapping[str, tuple[str, Any]] = {
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", lambda i, n: 1980 - i),
    "DCGM_FI_DEV_MEM_CLOCK": ("gauge", lambda i, n: 2619),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gauge", lambda i, n: 60 + n % 7 + i),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", lambda i, n: 50 + n % 9 + i),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", lambda i, n: 412.125 + n + i),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("counter", lambda i, n: 2_641_000_000_123 + 400_000 * n + i),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("counter", lambda i, n: i),
    "DCGM_FI_DEV_GPU_UTIL": ("gauge", lambda i, n: (13 * n + i) % 101),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("gauge", lambda i, n: (7 * n + i) % 101),
    "DCGM_FI_DEV_FB_FREE": ("gauge", lambda i, n: 2_000 + n),
    "DCGM_FI_DEV_FB_USED": ("gauge", lambda i, n: 79_000 - n),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("counter", lambda i, n: 0),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("gauge", lambda i, n: 0),
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": ("gauge", lambda i, n: 0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("gauge", lambda i, n: 0.125 * (n % 8)),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("counter", lambda i, n: 123_456_789 + 1_000 * n + i),
}


def make_dcgm(number: int, gpus: int = 2) -> str:
    """A page in the shape of dcgm-exporter's."""
    lines = []
    for name, (kind, value) in DCGM.items():
        lines += [f"# HELP {name} A counter or gauge of DCGM.", f"# TYPE {name} {kind}"]
        for i in range(gpus):
            labels = {
                "gpu": i,
                "UUID": f"GPU-0000000{i}-5eed-0000-0000-000000000000",
                "pci_bus_id": f"00000000:{16 + i:02X}:00.0",
                "device": f"nvidia{i}",
                "modelName": "NVIDIA H100 80GB HBM3",
                "Hostname": "n7",
                "DCGM_FI_DRIVER_VERSION": "570.1",
            }
            inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value(i, number)}")
    return "\n".join(lines) + "\n"


def make_application(number: int, series: dict[Series, float], late: dict[int, float]) -> bytes:
    """A page with every type of metric, in protobuf, which alone has native histograms; adds them to `series`."""

    def keep(name: str, value: float, **labels: str) -> float:
        series[name, frozenset(labels.items())] = value
        return value

    exemplar = encode_nested(1, encode_text(1, "trace_id") + encode_text(2, "abc")) + encode_double(2, 1.0)
    requests = encode_double(1, keep("app_requests_total", 7.0 * number)) + encode_nested(2, exemplar)
    out = _family("app_requests_total", COUNTER, encode_nested(3, requests))
    out += _family("app_queue", GAUGE, encode_nested(2, encode_double(1, keep("app_queue", -1.5 * number))))
    out += _family("page_number", GAUGE, encode_nested(2, encode_double(1, float(number))))
    if number < ENDS_AFTER:
        out += _family("app_ends", GAUGE, encode_nested(2, encode_double(1, keep("app_ends", 5.0))))
    quantile = encode_double(1, 0.5) + encode_double(2, keep("app_rpc", 0.25 * number, quantile="0.5"))
    body = encode_unsigned(1, int(keep("app_rpc_count", 10 * number)))
    body += encode_double(2, keep("app_rpc_sum", 2.5 * number)) + encode_nested(3, quantile)
    out += _family("app_rpc", SUMMARY, encode_nested(4, body))
    body = encode_unsigned(1, int(keep("app_latency_count", 3 * number)))
    body += encode_double(2, keep("app_latency_sum", 0.75 * number))
    for bound, share in ((0.1, 1), (0.5, 2)):
        below = int(keep("app_latency_bucket", share * number, le=str(bound)))
        body += encode_nested(3, encode_unsigned(1, below) + encode_double(2, bound))
    keep("app_latency_bucket", 3 * number, le="+Inf")
    out += _family("app_latency", HISTOGRAM, encode_nested(7, body))
    out += _family("app_size", HISTOGRAM, encode_nested(7, _native_histogram(number)))
    keep("app_size_count", 6.0 * number)
    keep("app_size_sum", 1.5 * number)
    back = int(time.time() * 1000) - BACK_MS[number % 2 == 0]
    late[back] = float(number)
    value = encode_nested(2, encode_double(1, float(number))) + encode_unsigned(6, back)
    return out + _family("app_late", GAUGE, value)


def _native_histogram(number: int) -> bytes:
    """A histogram of schema 3 with two positive buckets of 2 and 4 times `number`."""
    body = encode_unsigned(1, 6 * number) + encode_double(2, 1.5 * number)
    body += encode_unsigned(5, _zigzag(3)) + encode_double(6, 1e-128) + encode_unsigned(7, 0)
    body += encode_nested(12, encode_unsigned(1, _zigzag(0)) + encode_unsigned(2, 2))
    return body + encode_unsigned(13, _zigzag(2 * number)) + encode_unsigned(13, _zigzag(2 * number))


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _family(name: str, kind: int, metric: bytes) -> bytes:
    """One MetricFamily with one metric, after its length."""
    body = encode_text(1, name) + encode_text(2, "Of a test.") + encode_unsigned(3, kind) + encode_nested(4, metric)
    return encode_nested(1, body)[1:]  # without the tag: a delimited message
