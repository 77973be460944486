"""Server-sent events (WHATWG HTML, 9.2) as bytes -> events, and what a Redfish event in them says. Pure.

The stream of events of one BMC: a connection of its own beside the one request, made anew with Last-Event-ID.
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

from agents.collectors.bmc.redfish_document import MAX_TEXT, Document, path_of
from agents.collectors.bmc.redfish_http import Client, Failure

MAX_EVENT = 1 << 20
"""Longest event, in bytes; a longer one is dropped. Chosen: an event of 100 records has some 100 KiB."""
MAX_RECORDS = 64
"""Most records of one event that are told; chosen."""
_LEAK = re.compile(r"LeakDetected(Normal|Warning|Critical)$")
_STATES = {"Normal": 0, "Warning": 1, "Critical": 2}
_WORDS = {
    # property of a record -> key of our event
    "Message": "message",
    "MessageId": "message_id",
    "MessageSeverity": "severity",
    "EventType": "type",
    "EventId": "event",
    "EventTimestamp": "timestamp",
}


@dataclass
class Parser:
    """Bytes in any pieces -> events. `last` is the id of the newest, for Last-Event-ID."""

    last: str = ""
    retry: float | None = None
    dropped: int = 0
    _rest: bytes = b""
    _data: list[bytes] = field(default_factory=list)
    _size: int = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that end in this piece."""
        self._rest += piece
        *lines, self._rest = re.split(rb"\r\n|\n|\r(?!$)", self._rest)
        if len(self._rest) > MAX_EVENT:
            self._rest, self._size = b"", MAX_EVENT + 1
        for line in lines:
            if line:
                self._line(line)
            elif self._data or self._size:
                data, size = b"\n".join(self._data), self._size
                self._data, self._size = [], 0
                if size > MAX_EVENT:
                    self.dropped += 1
                elif data:
                    yield data

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value) + 1
            if self._size <= MAX_EVENT:
                self._data.append(value)
            else:
                self._data = []
        elif name == b"id" and value.isascii() and len(value) <= MAX_TEXT and value.decode().isprintable():
            self.last = value.decode()
        elif name == b"retry" and value.isdigit() and len(value) < 9:
            self.retry = int(value) / 1000


@dataclass(frozen=True, slots=True)
class Said:
    """One record of a Redfish Event. origin: path of the resource that it is about; leak: state that it names."""

    origin: str
    data: Mapping[str, Any]
    leak: int | None = None

    @property
    def routine(self) -> bool:
        """Whether it says no more than that a resource changed (registry ResourceEvent), and nothing is wrong."""
        message = str(self.data.get("message_id", ""))
        quiet = self.data.get("severity", "OK") == "OK" and "log_entry" not in self.data
        return quiet and message.startswith("ResourceEvent.") and message.endswith("ResourceChanged")


def records(data: bytes) -> tuple[list[Said], int]:
    """The records of one event, and how many parts of it could not be read."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return [], 1
    if not isinstance(body, dict):
        return [], 1
    document = Document(body, "event")
    found = [_said(record) for record, _ in zip(document.each("Events"), range(MAX_RECORDS), strict=False)]
    return found, document.faults.count


def _said(record: Document) -> Said:
    """A record's words. The log entry is a link where the event is one of a LogService."""
    origin = record.body.get("OriginOfCondition")
    origin = origin.get("@odata.id") if isinstance(origin, Mapping) else origin
    path = path_of(origin.partition("#")[0]) if isinstance(origin, str) else None
    told: dict[str, Any] = {word: record.text(key) for key, word in _WORDS.items()}
    told["severity"] = told["severity"] or record.text("Severity")  # the name before Event 1.5
    arguments = record.body.get("MessageArgs")
    if isinstance(arguments, list):
        told["arguments"] = [str(argument)[:MAX_TEXT] for argument in arguments[:16]]
    told["origin"], told["log_entry"] = path, record.link("LogEntry")
    leak = _LEAK.search(told["message_id"] or "")
    data = {key: value for key, value in told.items() if value is not None}
    return Said(path or "", data, _STATES[leak[1]] if leak else None)


BACKOFF_S, BACKOFF_MOST_S = 1.0, 300.0
"""First and longest wait before the stream is opened anew; chosen: leaks are polled besides."""
SILENCE_S = 300.0
"""Silence after which the stream is opened anew, since a lost connection looks the same; chosen, above the keep-alive
comments that services send every 30 to 60 s."""


@dataclass
class Listener:
    """One stream. told: called with each record; fault: with why something of it could not be read."""

    client: Client
    headers: Callable[[], dict[str, str] | None]
    told: Callable[[Said], None]
    fault: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    open: bool = False
    """Whether the stream stands now."""
    _parser: Parser = field(default_factory=Parser)
    _path: str = ""
    _thread: threading.Thread | None = None

    def follow(self, path: str) -> None:
        """Listens to the stream at `path` from now on; nothing if it does already, or if there is none."""
        self._path = path
        if path and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="redfish events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self.stop.set()
        self.client.ended = True
        self.client.abort()

    def _run(self) -> None:
        failures = 0
        while not self.stop.is_set():
            heard = False
            try:
                heard = self._listen()
            except Failure as failure:
                self.fault(str(failure))
            except Exception as error:  # noqa: BLE001 - whatever an event holds must not end the stream; it is counted
                self.fault(f"{self._path}: {type(error).__name__}")
            finally:
                self.open = False
                self.client.close()
            failures = 0 if heard else failures + 1
            wait = min(BACKOFF_MOST_S, max(self._parser.retry or 0.0, BACKOFF_S * 2.0 ** min(failures, 12)))
            self.stop.wait(wait * (0.5 + 0.5 * random.random()))

    def _listen(self) -> bool:
        """Opens the stream and tells what comes until it ends; whether anything did. Raises Failure."""
        headers, path = self.headers(), self._path
        if headers is None:
            return False  # the BMC was not logged into yet
        headers = {**headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._parser.last:
            headers["Last-Event-ID"] = self._parser.last
        last = self._parser.last
        self._parser = Parser(last, self._parser.retry)  # half an event of the stream before is none
        heard = False
        try:
            response = self.client.open("GET", path, headers)
            if response.status != 200 or "event-stream" not in response.getheader("Content-Type", ""):
                raise Failure(f"GET {path}: HTTP {response.status}; wanted a text/event-stream")
            self.open = True
            while not self.stop.is_set() and (piece := response.read1(1 << 16)):
                heard = True
                self._tell(piece)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.open and not self.stop.is_set():  # an open one ends: services close them, and silence does
                raise Failure(f"GET {path}: {type(error).__name__}") from error
        return heard

    def _tell(self, piece: bytes) -> None:
        dropped = self._parser.dropped
        for data in self._parser.feed(piece):
            found, bad = records(data)
            for said in found:
                self.told(said)
            if bad:
                self.fault("an event that could not be read")
        if self._parser.dropped > dropped:
            self.fault("an event that was too long")
