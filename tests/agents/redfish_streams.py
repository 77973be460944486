"""Server-sent events of a Redfish double: each listener has a queue, and the last events can be requested again."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.agents.redfish_tree import ROOT, Document

MOST_KEPT = 100
"""Events that are kept for Last-Event-ID; chosen."""
KEEP_ALIVE = 2.0
"""Seconds of silence before a comment line; chosen: short, so that a test sees one."""
LEAKS = {"OK": ("LeakDetectedNormal", "OK"), "Warning": ("LeakDetectedWarning", "Warning")}
LEAKS["Critical"] = ("LeakDetectedCritical", "Critical")


@dataclass
class Streams:
    """The listeners of the event stream. `on` False: the service has no such stream."""

    on: bool = True
    keep_alive: float = KEEP_ALIVE
    listeners: list[queue.Queue[bytes | None]] = field(default_factory=list)
    kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def subscribe(self, last: str = "") -> queue.Queue[bytes | None]:
        """Returns a listener's queue, with the events since `last`. None in it ends the stream."""
        events: queue.Queue[bytes | None] = queue.Queue()
        with self.lock:
            for number, written in self.kept if last.isdigit() else ():
                if number > int(last):
                    events.put(written)
            self.listeners.append(events)
        return events

    def unsubscribe(self, events: queue.Queue[bytes | None]) -> None:
        with self.lock:
            self.listeners = [known for known in self.listeners if known is not events]

    def emit(self, record: Document) -> None:
        """Sends one event to all listeners, with defaults for fields that the record lacks."""
        with self.lock:
            self.sent += 1
            record = {"MemberId": "0", "EventId": str(self.sent), "EventTimestamp": _now()} | record
            body = {
                "@odata.type": "#Event.v1_10_1.Event",
                "Id": str(self.sent),
                "Name": "Event Array",
                "Context": "",
                "Events": [record],
            }
            written = f"id: {self.sent}\ndata: {json.dumps(body)}\n\n".encode()
            self.kept.append((self.sent, written))
            for events in self.listeners:
                events.put(written)

    def write(self, raw: bytes) -> None:
        """Sends raw bytes to all listeners, such as an invalid event."""
        with self.lock:
            for events in self.listeners:
                events.put(raw)

    def end_all(self) -> None:
        """Ends every stream, as a BMC that restarts does."""
        with self.lock:
            for events in self.listeners:
                events.put(None)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def change_event(path: str, pointer: str, value: Any) -> Document:
    """The event of a change: a leak has the Environmental registry's message, any other change ResourceChanged."""
    origin = {"OriginOfCondition": {"@odata.id": path}}
    if pointer == "/DetectorState" and value in LEAKS:
        message, severity = LEAKS[value]
        name = path.removeprefix(ROOT).rsplit("/", 1)[1]
        message_fields: Document = {
            "MessageId": f"Environmental.1.1.{message}",
            "MessageArgs": [name],
            "Severity": severity,
        }
        return (
            origin
            | message_fields
            | {"EventType": "Alert", "MessageSeverity": severity, "Message": f"{message} at {name}."}
        )
    message_fields = {
        "MessageId": "ResourceEvent.1.3.ResourceChanged",
        "EventType": "ResourceUpdated",
        "Severity": "OK",
    }
    return (
        origin | message_fields | {"MessageSeverity": "OK", "Message": "One or more resource properties have changed."}
    )
