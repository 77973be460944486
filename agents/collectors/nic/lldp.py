"""The far end of Ethernet links: switch and port of each interface, as lldpd hears them. It tells no signal.

`lldpcli -f json show neighbors`: which switch and port each interface is cabled to.

lldpd writes one thing in several shapes (lldpctl(8)): a list where there are several, the thing itself where there is
one; interfaces and chassis as objects keyed by their name, or, in `json0`, as objects that bear it. All are read.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.command import Command, CommandError
from agents.collectors.nic.ports import SOFTWARE, owners
from pipeline.model.records import Event

MOST_NEIGHBOURS = 256
"""Most interfaces that are taken; chosen: ten times those of the largest server."""
_TEXT = 128
"""Characters of a text that are kept; chosen: names of systems and ports have 255 at most and 30 in practice."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Who answers at the far end; empty is what it did not say. chassis: what never changes about a switch, its id."""

    switch: str
    chassis: str
    port: str
    description: str
    management: str

    @property
    def place(self) -> tuple[str, str]:
        """What a cable that was moved changes."""
        return self.chassis or self.switch, self.port


def parse_neighbours(text: str) -> dict[str, Neighbour]:
    """Interface -> neighbour. Of several on one interface (a hub, or CDP beside LLDP) the first that LLDP tells holds.

    Raises ValueError where the text is not JSON; what is of another form in it is left out.
    """
    try:
        whole = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    found: dict[str, tuple[bool, Neighbour]] = {}
    for name, facts in _interfaces(whole):
        via = _text(facts.get("via")) in ("", "LLDP")
        neighbour = _neighbour(facts)
        if (
            (neighbour.switch or neighbour.chassis)
            and len(found) < MOST_NEIGHBOURS
            and (name not in found or via > found[name][0])
        ):
            found[name] = via, neighbour
    return {name: neighbour for name, (_, neighbour) in found.items()}


def _interfaces(whole: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and content of each interface, whatever the shape."""
    for lldp in _each(_get(whole, "lldp")):
        for entry in _each(_get(lldp, "interface")):
            if not isinstance(entry, dict):
                continue
            if "chassis" in entry or "port" in entry:
                yield _text(entry.get("name")), entry
                continue
            for name, facts in entry.items():
                yield from ((name[:_TEXT], one) for one in _each(facts) if isinstance(one, dict))


def _neighbour(facts: Mapping[str, Any]) -> Neighbour:
    chassis, name = _chassis(facts.get("chassis"))
    port = _first(facts.get("port"))
    description, number = _text(_get(port, "descr")), _text(_get(port, "id"))
    # a port that is identified by an address is known to people by its description
    address = _get(_first(_get(port, "id")), "type") == "mac"
    return Neighbour(
        switch=name,
        chassis=_text(_get(chassis, "id")),
        port=description if address and description else number or description,
        description=description,
        management=_text(_get(chassis, "mgmt-ip")),
    )


def _chassis(found: Any) -> tuple[Any, str]:
    """Facts and name: `{"sw1": {...}}` where it has a name, `{"id": ...}` where it has none, `[{"name": ...}]`."""
    chassis = _first(found)
    if not isinstance(chassis, dict):
        return {}, ""
    if "id" in chassis:
        return chassis, _text(chassis.get("name"))
    return next(((_first(facts), _tidy(name)) for name, facts in chassis.items()), ({}, ""))


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _first(value: Any) -> Any:
    return next(iter(_each(value)), None)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str:
    """A text, the `value` of an object, or the first of several."""
    one = _first(value)
    if isinstance(one, dict):
        one = one.get("value")
    return _tidy(one) if isinstance(one, str) else str(one) if type(one) is int else ""


def _tidy(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_TEXT]).strip()


_MOST_OUTPUT = 4 << 20
"""Most bytes of one answer; chosen: 16 KiB for each of the most interfaces that are taken."""
_LIMIT_S = 20.0
"""How long lldpcli may take; chosen: it answers in milliseconds, and waits for a daemon that hangs."""
_WHEN = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ")
"""When lldpcli said a line: it would make one reason a new one each time."""
_MOST_EVENTS = 20
"""Most events of one look; chosen: a switch that is replaced changes 2 to 10 ports of a node."""


@dataclass
class Lldp(Collector):
    """Attributes of ports: peer_switch, peer_port, peer_description, peer_mgmt, peer_chassis; asked each `every` s.

    A neighbour that falls silent stays known: that is where the cable was. socket: of lldpd, where it is not the usual.
    """

    name: ClassVar[str] = "lldp"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("link_peer",)
    interval: float = 5.0
    command: Path = Path("/usr/sbin/lldpcli")
    socket: str = ""
    every: float = 60.0
    root: Path = Path("/sys/class/net")
    rdma_exclude: tuple[str, ...] = SOFTWARE
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _asker: _Asker | None = field(default=None, init=False, repr=False)
    _known: dict[str, Neighbour] = field(default_factory=dict, init=False, repr=False)
    _news: bool = field(default=False, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        if not self.command.is_file():
            raise NoData(
                f"{self.command}: no such command; install lldpd to learn which switch port each interface is on"
            )
        self.close()
        at = ("-u", self.socket) if self.socket else ()
        asker = _Asker((str(self.command), *at, "-f", "json", "show", "neighbors"), self.every)
        if trouble := asker.begin(self.deadline / 2):
            raise NoData(_absent(trouble))
        self._asker = asker

    def read(self) -> tuple[Reading, ...]:
        """What has changed since the last answer; it waits for none."""
        assert self._asker is not None, "read before open"
        found, trouble = self._asker.take()
        if trouble:
            raise NoData(_absent(trouble))
        events: list[Event] = []
        for interface, neighbour in (found or {}).items():
            before = self._known.get(interface)
            if before == neighbour or not (self.root / interface).exists():
                continue
            if before is not None and before.place != neighbour.place:
                if len(events) >= _MOST_EVENTS:
                    continue  # as it was: told at a later look
                events.append(self._moved(interface, before, neighbour))
            self._known[interface], self._news = neighbour, True
        return (Reading("nic", (), {}, tuple(events)),) if events or self._news else ()

    def renewed(self) -> bool:
        news, self._news = self._news, False
        return news

    def inventory(self) -> Mapping[str, Device]:
        entities = self._entities()
        return {
            entities[i]: Device((f"node:{self._node}",), _facts(n)) for i, n in self._known.items() if i in entities
        }

    def close(self) -> None:
        if self._asker is not None:
            self._asker.stop()
            self._asker = None

    def _entities(self) -> dict[str, str]:
        """Interface -> entity, by the name that the collectors of its state give it."""
        rdma = owners(self.root.parent / "infiniband", self.root, self.rdma_exclude) if self._known else {}
        present = [i for i in self._known if (self.root / i).exists()]
        return {i: f"port:{self._node}.{rdma[i].name if i in rdma else i}" for i in present}

    def _moved(self, interface: str, before: Neighbour, now: Neighbour) -> Event:
        entity = self._entities()[interface]
        data = {"peer": now.switch, "guid": now.chassis, "port": now.port}
        data |= {"from": before.switch, "from_guid": before.chassis, "from_port": before.port}
        return Event(self._now(), entity, "link_peer", data)


def _absent(trouble: str) -> str:
    return f"{trouble}; wanted a running lldpd and the right to its socket (group _lldpd, or root)"


class _Asker:
    """Asks once, so that it is known whether anybody is there, then in a thread of its own every so many seconds."""

    def __init__(self, command: tuple[str, ...], every: float) -> None:
        self._arguments, self._every = command, every
        self._command = Command(_LIMIT_S, _MOST_OUTPUT)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._found: dict[str, Neighbour] | None = None
        self._trouble = ""

    def begin(self, seconds: float) -> str:
        """The first answer is waited for that long; why there is none, and then no thread begins."""
        self._command.limit = seconds
        self._found, trouble = self._ask()
        self._command.limit = _LIMIT_S
        if not trouble:
            threading.Thread(target=self._run, name="asks lldpd", daemon=True).start()
        return trouble

    def take(self) -> tuple[dict[str, Neighbour] | None, str]:
        """The newest answer, once, and why there is none."""
        with self._lock:
            found, self._found = self._found, None
            return found, self._trouble

    def stop(self) -> None:
        self._stop.set()
        self._command.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            found, trouble = self._ask()
            with self._lock:
                self._found, self._trouble = found, trouble

    def _ask(self) -> tuple[dict[str, Neighbour] | None, str]:
        try:
            output = self._command.run(self._arguments)
            if output.code:
                last = (output.talk.strip() or "ended without a word").splitlines()[-1]
                return None, f"{self._arguments[0]}: {_WHEN.sub('', last)[:200]}"
            return parse_neighbours(output.text), ""
        except CommandError as error:
            return None, str(error)
        except Exception as fault:  # noqa: BLE001 - one odd answer must not end all asking; it is told
            return None, f"{self._arguments[0]}: its answer cannot be read: {type(fault).__name__}: {fault}"


def _facts(neighbour: Neighbour) -> dict[str, object]:
    n = neighbour
    told = {
        "peer_switch": n.switch,
        "peer_chassis": n.chassis,
        "peer_port": n.port,
        "peer_description": n.description,
        "peer_mgmt": n.management,
    }
    return {name: text for name, text in told.items() if text}
