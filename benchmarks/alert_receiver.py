"""A webhook receiver on a free loopback port that notes when each firing alert arrives."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def now() -> int:
    """Returns the time of the wall clock (UTC us)."""
    return time.time_ns() // 1000


@contextmanager
def receiver(note: Callable[[int, Mapping[str, Any]], None]) -> Iterator[int]:
    """Runs the receiver; yields its port. note: called with the time of arrival and the labels of a firing alert."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            at, body = now(), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                if alert["status"] == "firing":
                    note(at, alert["labels"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Logs nothing: the table is the output."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
