"""The thread that scrapes one endpoint again and again; what it brought waits for the collector's next look."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.collector import HANG_S
from agents.sources.scrape.fetch import Fetch, Unreachable
from agents.sources.scrape.mapping import Names
from agents.sources.scrape.series import page
from agents.sources.scrape.translation import Translated, translate

MOST_WORDS = 300
"""Most characters of a reason: some hold what the exporter sent. Chosen: two lines of a terminal."""
_SHOWN = 60
"""Characters of a page without a series that are shown; chosen: enough to see what it is instead."""
OVERDUE_S = 5.0
"""How much longer than its time-out a GET may take before it counts as down, HANG_S at most; chosen. It ends itself in
time; only what has no time-out, as a name server or a file on a server that is away, can take longer."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of one endpoint: what it brought, or why it brought nothing. took: seconds."""

    target: str
    reason: str = ""
    took: float = 0.0
    series: int = 0
    bad: int = 0
    found: Translated = field(default_factory=Translated)


class Scraper:
    """One endpoint. Only the newest scrape that nobody took yet is kept."""

    def __init__(self, fetch: Fetch, names: Names, given: Mapping[str, str], interval: float, most: int) -> None:
        self._fetch, self._names, self._given, self._interval, self._most = fetch, names, given, interval, most
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: Scrape | None = None
        self._overdue = math.inf
        name = f"scrape {given['target']}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Scrape | None:
        """The newest scrape, once; one without a page, once an interval, for a GET that does not end."""
        with self._lock:
            newest, self._newest = self._newest, None
            if newest is None and time.monotonic() > self._overdue:
                self._overdue = time.monotonic() + self._interval
                return Scrape(self._given["target"], "a GET does not end: is the exporter, a name server or file away?")
        return newest

    def stop(self) -> None:
        """Ends the thread at its next step; it waits for nobody."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            newest = self.scrape()
            with self._lock:
                self._newest = newest
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def scrape(self) -> Scrape:
        """One scrape now."""
        target, began = self._given["target"], time.monotonic()
        reason, series, bad, found = "", 0, 0, Translated()
        try:
            text = self._text()
            read = page(text)
            series, bad = len(read.series), read.bad
            if bad > series > 0:
                raise Unreachable(f"{bad} lines that are no samples beside {series} series: is it another page?")
            if not series:
                raise Unreachable(f"no series in {len(text)} characters that begin with {text[:_SHOWN]!a}")
            found = translate(read, self._names, self._given, self._most)
        except Unreachable as why:
            reason = str(why)
        except Exception as fault:  # noqa: BLE001 - a thread that ended would be an endpoint that is silent for ever
            reason = f"{type(fault).__name__}: {fault}"
        return Scrape(target, _plain(reason), time.monotonic() - began, series, bad, found)

    def _text(self) -> str:
        with self._lock:
            self._overdue = time.monotonic() + min(self._fetch.timeout + OVERDUE_S, HANG_S)
        try:
            return self._fetch()
        finally:
            with self._lock:
                self._overdue = math.inf


def _plain(reason: str) -> str:
    """A reason that is short and holds nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in reason[:MOST_WORDS])
