"""Faults of a Redfish double's responses: delays, cuts, wrong types, refusals, redirects, slow drips."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LONGEST_DELAY = 180.0
"""Longest response time observed on BMCs, in seconds."""
DRIP = 16
"""Bytes of a slow drip that are sent together; chosen: small enough that a short document takes many."""


@dataclass
class Fault:
    """Changes every response of a path (`"/a/*"`: of all paths below it) until it is cleared, or `times` responses."""

    delay: float = 0.0
    hold: threading.Event | None = None
    """No response is sent before it is set."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Sent unchanged, instead of the document."""
    mangle: Callable[[Any], Any] | None = None
    """Returns a changed document: wrong types, missing fields."""
    truncate: float = 1.0
    """This share of the body is sent as a complete, well-framed response: truncated JSON."""
    drop: float = 1.0
    """After this share of the body the connection breaks; 0: before the status line."""
    drip: float = 0.0
    """Seconds between each 16 bytes."""
    pad: int = 0
    """Bytes of white space to add: a huge response that is valid JSON."""
    times: int = -1

    def wait(self, closing: threading.Event) -> None:
        """Waits as the fault requires, but not after the double is closed."""
        closing.wait(min(self.delay, LONGEST_DELAY))
        while self.hold is not None and not self.hold.is_set() and not closing.is_set():
            self.hold.wait(0.02)

    def corrupt(self, body: bytes) -> bytes:
        """The changed body."""
        if self.body is not None:
            body = self.body
        elif self.mangle is not None:
            body = json.dumps(self.mangle(json.loads(body))).encode()
        body += b" " * self.pad
        return body[: int(len(body) * self.truncate)]


def refusal(status: int, retry_after: str = "") -> Fault:
    """Every response has this status, with a Retry-After if given."""
    return Fault(status=status, headers={"Retry-After": retry_after} if retry_after else {})


def redirect(url: str, status: int = 307) -> Fault:
    return Fault(status=status, headers={"Location": url}, body=b"")


def wrong_types(document: Any) -> Any:
    """The same document with every value of another type than its own: numbers are words, objects are lists."""
    if isinstance(document, dict):
        return {key: value if key.startswith("@odata") else _change_type(value) for key, value in document.items()}
    return _change_type(document)


def _change_type(value: Any) -> Any:
    if isinstance(value, str):
        return {"was": value}
    if isinstance(value, bool) or value is None:
        return [value]
    if isinstance(value, int | float):
        return f"{value} or so"
    return [value] if isinstance(value, dict) else {"list": value}


@dataclass
class Faults:
    """The faults in force, by path."""

    by_path: dict[str, Fault] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, fault: Fault) -> None:
        with self.lock:
            self.by_path[path] = fault

    def clear(self, path: str | None = None) -> None:
        """Removes one path's fault, or all. Held responses are sent."""
        with self.lock:
            gone = [path] if path is not None else list(self.by_path)
            for fault in filter(None, (self.by_path.pop(key, None) for key in gone)):
                if fault.hold is not None:
                    fault.hold.set()

    def next_fault(self, path: str) -> Fault:
        """The fault for the next response of this path."""
        with self.lock:
            for key, fault in self.by_path.items():
                if fault.times and (key == path or (key.endswith("*") and path.startswith(key[:-1]))):
                    fault.times -= fault.times > 0
                    return fault
        return Fault()
