"""Whatever has a Prometheus or OpenMetrics endpoint: its metrics under our own names, the rest as custom signals."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from agents.collector import Collector, Device, Reading, wall_clock
from agents.collectors.columns import readings
from agents.collectors.exporters.mapping import load
from agents.node.batches import merge_inventories
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event

if TYPE_CHECKING:
    from agents.collectors.exporters.scraper import Scrape

MOST_CUSTOM = 5000
"""Most custom signals of one endpoint that can be asked for: with four such endpoints an answer of the worker stays
below its 8 MiB."""


def _allowed(url: str) -> bool:
    """http is for this host and its own networks; numbers of others travel encrypted."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets without an address in them, or a port that is none
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or port == 0:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and (parts.scheme == "https" or _near(parts.hostname, named=True))


def _near(host: str, named: bool) -> bool:
    """Whether it is this host or in its networks. named: the answer for a name, of which that cannot be known."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return named or host == "localhost"


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. mapping: a shipped one by name, or the path of a file; "" keeps all as custom signals.

    node: the node that it tells of, for mappings that say {node}, and parent of its custom signals.
    custom: most series that no mapping knows and that are kept all the same; 0 keeps none.
    """

    name: str
    url: str = field(
        metadata=constraint(
            "http:// or https:// with a host, a port of 1 to 65535 and no user name in it; https to public ones",
            _allowed,
        )
    )
    mapping: str = field(default="", metadata=constraint("a shipped mapping or a file", lambda name: bool(load(name))))
    node: str = ""
    interval: float = field(default=15.0, metadata=constraint("seconds, 1 to 3600", lambda s: 1 <= s <= 3600))
    timeout: float = field(
        default=10.0, metadata=constraint("seconds, above 0 and at most 300", lambda s: 0 < s <= 300)
    )
    custom: int = field(default=1000, metadata=constraint(f"0 to {MOST_CUSTOM}", lambda n: 0 <= n <= MOST_CUSTOM))
    ca_file: Path | None = None
    token_file: Path | None = None


@dataclass
class Prometheus(Collector):
    """Every signal that a mapping names, custom.value for the rest, exporter.* of each endpoint, events `exporter`.

    `signals` are those without a mapping; which ones a mapping brings is the mapping's own affair. Each endpoint has a
    thread of its own, so that one that hangs delays no other. A value counts for the look after its scrape; timestamps
    of the exporter are left aside.
    """

    name: ClassVar[str] = "prometheus"
    signals: ClassVar[tuple[str, ...]] = (
        *("custom.value", "exporter.up", "exporter.scrape_time", "exporter.series", "exporter.mapped"),
        *("exporter.unmapped", "exporter.dropped", "exporter.bad_lines"),
    )
    events: ClassVar[tuple[str, ...]] = ("exporter",)
    lane: ClassVar[str] = "scrape"
    remote: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    settling: ClassVar[float] = 5.0
    endpoints: tuple[Endpoint, ...] = ()
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _scrapers: list[Any] = field(default_factory=list, init=False, repr=False)
    _devices: dict[str, dict[str, Device]] = field(default_factory=dict, init=False, repr=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _renewed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) < len(names) or not all(name.isprintable() and name for name in names):
            raise ConfigError(
                f"[[collector.prometheus.endpoints]] name: {names}; wanted each once, of printable letters"
            )
        for one in self.endpoints:
            parts = urlsplit(one.url)
            if one.token_file and parts.scheme == "http" and not _near(parts.hostname or "", named=False):
                wanted = "wanted https, or http to a private address"
                where = f"[[collector.prometheus.endpoints]] {one.name}: url = {one.url!r}"
                raise ConfigError(f"{where} would send the token of token_file in clear; {wanted}")

    def wanted(self) -> bool:
        return bool(self.endpoints)

    def open(self, node: str) -> None:
        from agents.collectors.exporters.scraper import (
            Fetch,  # here: it loads http and ssl, which most agents do without
            Scraper,
        )

        self.close()
        self._reasons = {}
        for one in self.endpoints:
            given = {"target": one.name, "node": one.node or urlsplit(one.url).hostname or ""}
            if not one.node and given["node"] in ("localhost", "127.0.0.1", "::1"):
                given["node"] = node
            fetch = Fetch(one.url, one.timeout, one.ca_file, one.token_file)
            self._scrapers.append(Scraper(fetch, load(one.mapping), given, one.interval, one.custom))
        for scraper in self._scrapers:
            scraper.start()

    def read(self) -> tuple[Reading, ...]:
        scrapes = [scrape for scraper in self._scrapers if (scrape := scraper.take())]
        found = [reading for scrape in scrapes for reading in self._readings(scrape)]
        events = [event for scrape in scrapes for event in self._changes(scrape)]
        own = readings(((f"exporter:{s.target}", _own(s)) for s in scrapes), "exporter")
        told = (Reading("exporter", (), {}, tuple(events)),) if events else ()
        return (*found, *own, *told)

    def inventory(self) -> Mapping[str, Device]:
        facts = {e.name: {"url": e.url, "mapping": e.mapping} for e in self.endpoints}
        own = {f"exporter:{name}": Device((), facts[name]) for name in self._devices}
        return merge_inventories([*self._devices.values(), own])

    def renewed(self) -> bool:
        renewed, self._renewed = self._renewed, False
        return renewed

    def close(self) -> None:
        for scraper in self._scrapers:
            scraper.stop()
        self._scrapers, self._devices = [], {}

    def _readings(self, scrape: Scrape) -> list[Reading]:
        """What a scrape brought; devices of an endpoint that does not answer stay known."""
        if not scrape.reason or scrape.target not in self._devices:
            self._renewed |= self._devices.get(scrape.target) != scrape.found.devices
            self._devices[scrape.target] = scrape.found.devices
        rows = scrape.found.rows
        return [reading for device_class in rows for reading in readings(rows[device_class].items(), device_class)]

    def _changes(self, scrape: Scrape) -> list[Event]:
        """An event where an endpoint stopped answering, or answers again."""
        before = self._reasons.get(scrape.target, "")
        self._reasons[scrape.target] = scrape.reason
        if bool(before) == bool(scrape.reason):
            return []
        data: dict[str, Any] = {"state": "down" if scrape.reason else "up", "reason": scrape.reason}
        return [Event(self._now(), f"exporter:{scrape.target}", "exporter", data)]


def _own(scrape: Scrape) -> dict[str, float]:
    found = scrape.found
    return {
        "exporter.up": float(not scrape.reason),
        "exporter.scrape_time": scrape.took,
        "exporter.series": scrape.series,
        "exporter.mapped": found.mapped,
        "exporter.unmapped": found.unmapped,
        "exporter.dropped": found.dropped,
        "exporter.bad_lines": scrape.bad,
    }
