"""The stream of events of one BMC: a connection of its own beside the one request, made anew with Last-Event-ID."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.sources.redfish.client import Client, Failure
from agents.sources.redfish.stream import Parser, Said, records

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
