"""The thread that scrapes one endpoint again and again; what it brought waits for the collector's next look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agents.sources.scrape.fetch import Unreachable
from agents.sources.scrape.mapping import Names
from agents.sources.scrape.series import page
from agents.sources.scrape.translation import Translated, translate


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

    def __init__(
        self, fetch: Callable[[], str], names: Names, given: Mapping[str, str], interval: float, most: int
    ) -> None:
        self._fetch, self._names, self._given, self._interval, self._most = fetch, names, given, interval, most
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: Scrape | None = None
        name = f"scrape {given['target']}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Scrape | None:
        """The newest scrape, once."""
        with self._lock:
            newest, self._newest = self._newest, None
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
        try:
            found = page(self._fetch())
            translated = translate(found, self._names, self._given, self._most)
        except Unreachable as why:
            return Scrape(target, str(why), time.monotonic() - began)
        except Exception as fault:  # noqa: BLE001 - a thread that ended would be an endpoint that is silent for ever
            return Scrape(target, f"{type(fault).__name__}: {fault}", time.monotonic() - began)
        return Scrape(target, "", time.monotonic() - began, len(found.series), found.bad, translated)
