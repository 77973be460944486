"""Events of one BMC: a connection to its server-sent events (WHATWG HTML, 9.2), and the parsing of Redfish events.

The stream has its own connection beside the one of requests. It is reopened with Last-Event-ID.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collectors.bmc.redfish_document import MAX_TEXT, RedfishDocument, resource_path
from agents.collectors.bmc.redfish_http import RedfishConnection, RequestError

MAX_EVENT = 1 << 20
"""Longest event in bytes; a longer one is dropped. Chosen: an event of 100 records has some 100 KiB."""
MAX_RECORDS = 64
"""Most records of one event. Chosen."""
_LEAK = re.compile(r"LeakDetected(Normal|Warning|Critical)$")
_STATES = {"Normal": 0, "Warning": 1, "Critical": 2}
_EVENT_KEYS = {
    # property of a record -> key of our event
    "Message": "message",
    "MessageId": "message_id",
    "MessageSeverity": "severity",
    "EventType": "type",
    "EventId": "event",
    "EventTimestamp": "timestamp",
}


@dataclass
class SseParser:
    """Parses bytes in any pieces into events. `last_id` is the id of the newest, for Last-Event-ID."""

    last_id: str = ""
    retry: float | None = None
    dropped: int = 0
    _buffer: bytes = b""
    _data: list[bytes] = field(default_factory=list)
    _size: int = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yields the data of the events that end in this piece."""
        self._buffer += piece
        *lines, self._buffer = re.split(rb"\r\n|\n|\r(?!$)", self._buffer)
        if len(self._buffer) > MAX_EVENT:
            self._buffer, self._size = b"", MAX_EVENT + 1
        for line in lines:
            if line:
                self._parse_line(line)
            elif self._data or self._size:
                data, size = b"\n".join(self._data), self._size
                self._data, self._size = [], 0
                if size > MAX_EVENT:
                    self.dropped += 1
                elif data:
                    yield data

    def _parse_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value) + 1
            if self._size <= MAX_EVENT:
                self._data.append(value)
            else:
                self._data = []
        elif name == b"id" and value.isascii() and len(value) <= MAX_TEXT and value.decode().isprintable():
            self.last_id = value.decode()
        elif name == b"retry" and value.isdigit() and len(value) < 9:
            self.retry = int(value) / 1000


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One record of a Redfish Event. origin: path of the resource that it concerns; leak: the state that it reports."""

    origin: str
    data: Mapping[str, Any]
    leak: int | None = None

    @property
    def is_routine(self) -> bool:
        """Whether it only reports that a resource changed (registry ResourceEvent) without a problem."""
        message = str(self.data.get("message_id", ""))
        quiet = self.data.get("severity", "OK") == "OK" and "log_entry" not in self.data
        return quiet and message.startswith("ResourceEvent.") and message.endswith("ResourceChanged")


def parse_event(data: bytes) -> tuple[list[EventRecord], int]:
    """Returns the records of one event, and how many parts of it could not be read."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return [], 1
    if not isinstance(body, dict):
        return [], 1
    document = RedfishDocument(body, "event")
    found = [
        _parse_event_record(record) for record, _ in zip(document.children("Events"), range(MAX_RECORDS), strict=False)
    ]
    return found, document.faults.count


def _parse_event_record(record: RedfishDocument) -> EventRecord:
    """Returns one record. The log entry is a link if the event is from a LogService."""
    origin = record.body.get("OriginOfCondition")
    origin = origin.get("@odata.id") if isinstance(origin, Mapping) else origin
    path = resource_path(origin.partition("#")[0]) if isinstance(origin, str) else None
    reported: dict[str, Any] = {word: record.text(key) for key, word in _EVENT_KEYS.items()}
    reported["severity"] = reported["severity"] or record.text("Severity")  # the key before Event 1.5
    arguments = record.body.get("MessageArgs")
    if isinstance(arguments, list):
        reported["arguments"] = [str(argument)[:MAX_TEXT] for argument in arguments[:16]]
    reported["origin"], reported["log_entry"] = path, record.link("LogEntry")
    leak = _LEAK.search(reported["message_id"] or "")
    data = {key: value for key, value in reported.items() if value is not None}
    return EventRecord(path or "", data, _STATES[leak[1]] if leak else None)


STREAM_BACKOFF_S, MAX_STREAM_BACKOFF_S = 1.0, 300.0
"""First and longest wait before the stream is reopened. Chosen: leaks are also polled."""
SILENCE_S = 300.0
"""Silence after which the stream is reopened, since a lost connection looks the same. Chosen: longer than the
keep-alive comments that services send every 30 to 60 s."""


@dataclass
class EventListener:
    """One stream. on_record: called with each record; on_fault: called with the reason of a parse error."""

    client: RedfishConnection
    headers: Callable[[], dict[str, str] | None]
    on_record: Callable[[EventRecord], None]
    on_fault: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    is_open: bool = False
    """Whether the stream is open."""
    _parser: SseParser = field(default_factory=SseParser)
    _path: str = ""
    _thread: threading.Thread | None = None

    def start(self, path: str) -> None:
        """Starts reading the stream at `path`, unless it is already read or `path` is empty."""
        self._path = path
        if path and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="redfish events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the stream."""
        self.stop.set()
        self.client.closing = True
        self.client.abort()

    def _run(self) -> None:
        failures = 0
        while not self.stop.is_set():
            received = False
            try:
                received = self._listen()
            except RequestError as failure:
                self.on_fault(str(failure))
            except Exception as error:  # noqa: BLE001 - no content of an event may end the thread; it is counted
                self.on_fault(f"{self._path}: {type(error).__name__}")
            finally:
                self.is_open = False
                self.client.close()
            failures = 0 if received else failures + 1
            wait = min(
                MAX_STREAM_BACKOFF_S, max(self._parser.retry or 0.0, STREAM_BACKOFF_S * 2.0 ** min(failures, 12))
            )
            self.stop.wait(wait * (0.5 + 0.5 * random.random()))

    def _listen(self) -> bool:
        """Opens the stream and handles events until it ends. Returns whether anything arrived. Raises RequestError."""
        headers, path = self.headers(), self._path
        if headers is None:
            return False  # not logged in yet
        headers = {**headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._parser.last_id:
            headers["Last-Event-ID"] = self._parser.last_id
        last = self._parser.last_id
        self._parser = SseParser(last, self._parser.retry)  # half an event of the previous stream is dropped
        received = False
        try:
            response = self.client.open("GET", path, headers)
            if response.status != 200 or "event-stream" not in response.getheader("Content-Type", ""):
                raise RequestError(f"GET {path}: HTTP {response.status}; expected text/event-stream")
            self.is_open = True
            while not self.stop.is_set() and (piece := response.read1(1 << 16)):
                received = True
                self._handle(piece)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if (
                not self.is_open and not self.stop.is_set()
            ):  # an open stream may end: services close it, or it was silent for too long
                raise RequestError(f"GET {path}: {type(error).__name__}") from error
        return received

    def _handle(self, piece: bytes) -> None:
        dropped = self._parser.dropped
        for data in self._parser.feed(piece):
            found, bad = parse_event(data)
            for error_bytes in found:
                self.on_record(error_bytes)
            if bad:
                self.on_fault("an event that could not be read")
        if self._parser.dropped > dropped:
            self.on_fault("an event that was too long")
