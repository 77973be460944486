"""The collector `prometheus`: reads any Prometheus or OpenMetrics endpoint; a mapping translates its metrics to
signals.

Metrics without a mapping become custom signals.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from agents.collector import Collector, Device, Reading, wall_clock
from agents.collectors.columns import readings_by_signals
from agents.node.batches import merge_inventories
from pipeline.config.settings import constraint
from pipeline.foreign.mapping import load_mapping
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event

if TYPE_CHECKING:
    from agents.collectors.exporters.scraper import ScrapeResult

MAX_CUSTOM = 5000
"""Most custom signals of one endpoint: with four such endpoints the worker's answer stays below its 8 MiB."""


def _is_allowed_url(url: str) -> bool:
    """Whether the URL is allowed. http is for this host and private networks; everything else must be encrypted."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets without an address, or an invalid port
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or port == 0:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and (parts.scheme == "https" or _is_private_host(parts.hostname, named=True))


def _is_private_host(host: str, named: bool) -> bool:
    """Whether the host is this host or in a private network. named: the result for a host name."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return named or host == "localhost"


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. mapping: a shipped one by name, or the path of a file; "" keeps all series as custom signals.

    node: the node that it describes, for mappings with {node}, and parent of its custom signals. custom: most series
    without a mapping that are kept; 0 keeps none.
    """

    name: str
    url: str = field(
        metadata=constraint(
            "http:// or https:// with a host, a port of 1 to 65535 and no user name in it; https to public ones",
            _is_allowed_url,
        )
    )
    mapping: str = field(
        default="", metadata=constraint("a shipped mapping or a file", lambda name: bool(load_mapping(name)))
    )
    node: str = ""
    interval: float = field(default=15.0, metadata=constraint("seconds, 1 to 3600", lambda s: 1 <= s <= 3600))
    timeout: float = field(
        default=10.0, metadata=constraint("seconds, above 0 and at most 300", lambda s: 0 < s <= 300)
    )
    custom: int = field(default=1000, metadata=constraint(f"0 to {MAX_CUSTOM}", lambda n: 0 <= n <= MAX_CUSTOM))
    ca_file: Path | None = None
    token_file: Path | None = None


@dataclass
class Prometheus(Collector):
    """Reports the signals of its mappings, custom.value for other series, and exporter.* of each endpoint.

    `signals` has those without a mapping; the mappings bring the others. Each endpoint has its own thread, so that a
    slow one delays no other. A value counts for the read after its scrape; the exporter's timestamps are ignored. An
    event `exporter` reports an endpoint that went down or came back.
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
                f"[[collector.prometheus.endpoints]] name: {names}; expected unique names of printable characters"
            )
        for one in self.endpoints:
            parts = urlsplit(one.url)
            if one.token_file and parts.scheme == "http" and not _is_private_host(parts.hostname or "", named=False):
                wanted = "expected https, or http to a private address"
                where = f"[[collector.prometheus.endpoints]] {one.name}: url = {one.url!r}"
                raise ConfigError(f"{where} would send the token of token_file unencrypted; {wanted}")

    def has_work(self) -> bool:
        """See `Collector.has_work`."""
        return bool(self.endpoints)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        from agents.collectors.exporters.scraper import (
            EndpointScraper,
            PageFetcher,  # imported here: it loads http and ssl, which most agents do not need
        )

        self.close()
        self._reasons = {}
        for one in self.endpoints:
            given = {"target": one.name, "node": one.node or urlsplit(one.url).hostname or ""}
            if not one.node and given["node"] in ("localhost", "127.0.0.1", "::1"):
                given["node"] = node
            fetch = PageFetcher(one.url, one.timeout, one.ca_file, one.token_file)
            self._scrapers.append(EndpointScraper(fetch, load_mapping(one.mapping), given, one.interval, one.custom))
        for scraper in self._scrapers:
            scraper.start()

    def read(self) -> tuple[Reading, ...]:
        """Returns the results of the scrapes since the last read."""
        scrapes = [scrape for scraper in self._scrapers if (scrape := scraper.pop_result())]
        found = [reading for scrape in scrapes for reading in self._build_readings(scrape)]
        events = [event for scrape in scrapes for event in self._state_events(scrape)]
        own = readings_by_signals(((f"exporter:{s.target}", _exporter_signals(s)) for s in scrapes), "exporter")
        event_readings = (Reading("exporter", (), {}, tuple(events)),) if events else ()
        return (*found, *own, *event_readings)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the devices of all endpoints, and the endpoints."""
        facts = {e.name: {"url": e.url, "mapping": e.mapping} for e in self.endpoints}
        own = {f"exporter:{name}": Device((), facts[name]) for name in self._devices}
        return merge_inventories([*self._devices.values(), own])

    def inventory_changed(self) -> bool:
        """See `Collector.inventory_changed`."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def close(self) -> None:
        """See `Collector.close`."""
        for scraper in self._scrapers:
            scraper.stop()
        self._scrapers, self._devices = [], {}

    def _build_readings(self, scrape: ScrapeResult) -> list[Reading]:
        """Returns the readings of one scrape; devices of an endpoint that does not answer stay known."""
        if not scrape.reason or scrape.target not in self._devices:
            self._renewed |= self._devices.get(scrape.target) != scrape.translation.devices
            self._devices[scrape.target] = scrape.translation.devices
        rows = scrape.translation.rows
        return [
            reading
            for device_class in rows
            for reading in readings_by_signals(rows[device_class].items(), device_class)
        ]

    def _state_events(self, scrape: ScrapeResult) -> list[Event]:
        """Returns an event if the endpoint went down or came back up."""
        before = self._reasons.get(scrape.target, "")
        self._reasons[scrape.target] = scrape.reason
        if bool(before) == bool(scrape.reason):
            return []
        data: dict[str, Any] = {"state": "down" if scrape.reason else "up", "reason": scrape.reason}
        return [Event(self._now(), f"exporter:{scrape.target}", "exporter", data)]


def _exporter_signals(scrape: ScrapeResult) -> dict[str, float]:
    found = scrape.translation
    return {
        "exporter.up": float(not scrape.reason),
        "exporter.scrape_time": scrape.took,
        "exporter.series": scrape.series,
        "exporter.mapped": found.mapped,
        "exporter.unmapped": found.unmapped,
        "exporter.dropped": found.dropped,
        "exporter.bad_lines": scrape.bad,
    }
