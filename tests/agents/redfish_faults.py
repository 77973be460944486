"""What goes wrong with a Redfish double's answers: delays, cuts, wrong types, refusals, redirects, slow drips."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LONGEST_DELAY = 180.0
"""As long as BMCs were seen to take for one answer, in seconds."""
DRIP = 16
"""Bytes of a slow drip that go out at once; chosen: small enough that a short document takes many."""


@dataclass
class Fault:
    """Befalls each answer of a path (`"/a/*"`: of all below it) until mended, or `times` answers."""

    delay: float = 0.0
    hold: threading.Event | None = None
    """Nothing is answered before it is set."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Sent as it is, instead of the document."""
    mangle: Callable[[Any], Any] | None = None
    """Makes another document of the right one: wrong types, missing fields."""
    truncate: float = 1.0
    """This share of the body is sent, as a whole and well-framed answer: truncated JSON."""
    drop: float = 1.0
    """After this share of the body the connection breaks; 0: before the status line."""
    drip: float = 0.0
    """Seconds between each 16 bytes."""
    pad: int = 0
    """So many bytes of white space more: a huge answer that is valid JSON."""
    times: int = -1

    def wait(self, closing: threading.Event) -> None:
        """Waits as the fault says, but no longer than the double lives."""
        closing.wait(min(self.delay, LONGEST_DELAY))
        while self.hold is not None and not self.hold.is_set() and not closing.is_set():
            self.hold.wait(0.02)

    def spoil(self, body: bytes) -> bytes:
        """The body as it is sent."""
        if self.body is not None:
            body = self.body
        elif self.mangle is not None:
            body = json.dumps(self.mangle(json.loads(body))).encode()
        body += b" " * self.pad
        return body[: int(len(body) * self.truncate)]


def refusal(status: int, retry_after: str = "") -> Fault:
    """Every answer is this status, with a Retry-After if given."""
    return Fault(status=status, headers={"Retry-After": retry_after} if retry_after else {})


def redirect(url: str, status: int = 307) -> Fault:
    return Fault(status=status, headers={"Location": url}, body=b"")


def wrong_types(document: Any) -> Any:
    """The same document with every value of another type than its own: numbers are words, objects are lists."""
    if isinstance(document, dict):
        return {key: value if key.startswith("@odata") else _turned(value) for key, value in document.items()}
    return _turned(document)


def _turned(value: Any) -> Any:
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

    def mend(self, path: str | None = None) -> None:
        """Takes away one path's fault, or all. Who is held is let go."""
        with self.lock:
            gone = [path] if path is not None else list(self.by_path)
            for fault in filter(None, (self.by_path.pop(key, None) for key in gone)):
                if fault.hold is not None:
                    fault.hold.set()

    def of(self, path: str) -> Fault:
        """What befalls the next answer of this path."""
        with self.lock:
            for key, fault in self.by_path.items():
                if fault.times and (key == path or (key.endswith("*") and path.startswith(key[:-1]))):
                    fault.times -= fault.times > 0
                    return fault
        return Fault()
