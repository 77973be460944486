"""A Redfish service for tests over real HTTP or HTTPS on loopback: it serves a tree, injects faults and sends events.

By hand: `python -m tests.agents.redfish_double --port 8443 --tree FILE.json` (or a name: cdu, shelf, pdu, chassis).
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.agents.redfish_answers import Service
from tests.agents.redfish_faults import DRIP, Fault, Faults
from tests.agents.redfish_message import Request, Response, error
from tests.agents.redfish_streams import Streams, change_event
from tests.agents.redfish_tree import SSE_URI, Document, Tree, normal
from tests.agents.redfish_trees import TREES

MOST_RECORDED = 100_000
"""Requests that are kept; chosen: an hour of a busy poller."""
MOST_BODY = 1 << 20
"""Bytes of a request that are read; chosen: beyond any that a client of telemetry sends."""


@dataclass
class RecordedRequest:
    """One received request and its response. `ended` 0: the response is not finished."""

    method: str
    path: str
    target: str
    headers: dict[str, str]
    began: float
    status: int = 0
    ended: float = 0.0


class Double:
    """One BMC. `url` is its address; `close()` ends its threads and connections."""

    def __init__(self, tree: Tree, *, port: int = 0, tls: ssl.SSLContext | None = None, **service: Any) -> None:
        self.tree, self.faults, self.streams = tree, Faults(), Streams()
        self.service = Service(tree, emit=self.streams.emit, **service)
        self.requests: deque[RecordedRequest] = deque(maxlen=MOST_RECORDED)
        self.in_flight = self.most_in_flight = 0
        self.closing, self.lock = threading.Event(), threading.Lock()
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.double, self._http.tls = self, tls
        self.port = self._http.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="redfish double")
        self._thread.start()

    @property
    def user(self) -> str:
        return self.service.user

    @property
    def password(self) -> str:
        return self.service.password

    def set(self, path: str, pointer: str, value: Any, *, event: bool = True) -> None:
        """Changes one value and sends an event to all listeners."""
        self.tree.set(path, pointer, value)
        if event:
            self.streams.emit(change_event(normal(path), pointer, value))

    def fault(self, path: str, fault: Fault | None = None, **how: Any) -> Fault:
        """Sets the fault of `path` (`"*"`: of all paths) from now on."""
        found = fault or Fault(**how)
        self.faults.put(path, found)
        return found

    def clear_fault(self, path: str | None = None) -> None:
        self.faults.clear(path)

    def requests_for(self, path: str, method: str = "GET") -> list[RecordedRequest]:
        """The requests for one path so far."""
        return [record for record in list(self.requests) if record.path == normal(path) and record.method == method]

    @contextmanager
    def record_request(self, record: RecordedRequest, counted: bool) -> Iterator[None]:
        with self.lock:
            self.requests.append(record)
            self.in_flight += counted
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            with self.lock:
                self.in_flight -= counted
                record.ended = time.monotonic()

    def close(self) -> None:
        self.closing.set()
        self.clear_fault()
        self.streams.end_all()
        self._http.shutdown()
        self._http.close_connections()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Double:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """Joins its threads at the end, after all connections are closed."""

    daemon_threads, request_queue_size = False, 64
    double: Double
    tls: ssl.SSLContext | None = None

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # a client without TLS, or one that closes the connection, is dropped
            if self.tls is not None:
                request.settimeout(10)
                request = self.tls.wrap_socket(request, server_side=True)
                request.settimeout(None)
            self.connections.add(request)
            try:
                super().finish_request(request, client_address)
            finally:
                self.connections.discard(request)
                request.close()

    def close_connections(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _any(self) -> None:
        size = self.headers.get("Content-Length", "0")
        body = self.rfile.read(min(int(size), MOST_BODY)) if size.isdigit() else b""
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        double = self.server.double
        record = RecordedRequest(self.command, request.path, self.path, headers, time.monotonic())
        stream = request.path == normal(SSE_URI) and self.command == "GET"
        with double.record_request(record, counted=not stream):
            fault = double.faults.next_fault(request.path)
            fault.wait(double.closing)
            if double.closing.is_set():
                self.close_connection = True
            elif stream and not fault.status:
                record.status = self._stream(request)
            else:
                record.status = self._answer(request, fault)

    do_GET = do_HEAD = do_POST = do_PATCH = do_DELETE = do_PUT = do_OPTIONS = _any  # noqa: N815  # the library's names

    def _answer(self, request: Request, fault: Fault) -> int:
        if fault.status:
            response = error(fault.status, "ServiceTemporarilyUnavailable" if fault.status == 503 else "InternalError")
            response.headers.update(fault.headers)
        else:
            response = self.server.double.service.respond(request)
            response.headers.update(fault.headers)
        body = response.encoded()
        if body or fault.body is not None:
            body = fault.corrupt(body)
        self._send(response, body, fault)
        return response.status

    def _send(self, response: Response, body: bytes, fault: Fault) -> None:
        sent = body[: int(len(body) * fault.drop)]
        if fault.drop < 1:
            self.close_connection = True
        if fault.drop <= 0:
            return
        self.send_response(response.status)
        self._headers(response, len(body))
        if self.command == "HEAD" or response.status in (204, 304):
            return
        step = DRIP if fault.drip else max(1, len(sent))
        with suppress(OSError):  # the client closed the connection
            for start in range(0, len(sent), step):
                self.wfile.write(sent[start : start + step])
                self.server.double.closing.wait(fault.drip)

    def _headers(self, response: Response, size: int) -> None:
        headers = {"OData-Version": "4.0", "Cache-Control": "no-cache"} | response.headers
        if response.status != 204:
            headers["Content-Length"] = str(size)
        if size:
            headers["Content-Type"] = response.kind
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, request: Request) -> int:
        """Sends events until one side closes the connection."""
        double = self.server.double
        if double.service.login and double.service.user_of(request.headers) is None:
            self._send(response := error(401, "NoValidSession", WWW_Authenticate="Basic"), response.encoded(), Fault())
            return 401
        if not double.streams.on:
            self._send(response := error(404, "ResourceMissingAtURI", request.path), response.encoded(), Fault())
            return 404
        self.close_connection = True
        events = double.streams.subscribe(request.headers.get("last-event-id", ""))
        self.send_response(200)
        for name, value in {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "OData-Version": "4.0",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            while (written := self._next(events)) is not None:
                self.wfile.write(written)
        except OSError:  # the listener closed the connection
            return 200
        finally:
            double.streams.unsubscribe(events)
        return 200

    def _next(self, events: queue.Queue[bytes | None]) -> bytes | None:
        try:
            return events.get(timeout=self.server.double.streams.keep_alive)
        except queue.Empty:
            return b": still here\n\n"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def load_tree(name: str) -> Tree:
    """A tree by its name, or the one in a file."""
    return TREES[name]() if name in TREES else Tree.from_capture(json.loads(Path(name).read_text()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tree", default="cdu", help=f"a JSON file, or one of {', '.join(TREES)}")
    parser.add_argument("--user", default="operator")
    parser.add_argument("--password", default="wet-floor-17")
    parser.add_argument("--certificate", help="a PEM file with certificate and key: serve HTTPS")
    options = parser.parse_args(arguments)
    tls = None
    if options.certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(options.certificate)
    with Double(
        load_tree(options.tree), port=options.port, tls=tls, user=options.user, password=options.password
    ) as double:
        sys.stderr.write(f"{double.url} serves {len(double.tree.documents)} resources to {double.user}\n")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

__all__ = ["SSE_URI", "Document", "Double", "Fault", "RecordedRequest", "Tree"]
