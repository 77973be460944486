"""The far end of Ethernet links from lldpd: switch and port of each interface. Reports attributes, no signals.

Reads `lldpcli -f json show neighbors`. lldpd writes one thing in several shapes (lldpctl(8)): a list for several, the
object itself for one; interfaces and chassis as objects keyed by their name or, in `json0`, as objects that contain it.
All shapes are read.
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
from agents.collectors.command import CommandError, CommandRunner
from agents.collectors.nic.ports import SOFTWARE_RDMA, rdma_ports_by_interface
from pipeline.model.records import Event

MAX_NEIGHBORS = 256
"""Most interfaces. Chosen: ten times those of the largest server."""
_MAX_TEXT = 128
"""Characters of a text that are kept. Chosen: names of systems and ports have at most 255, in practice 30."""


@dataclass(frozen=True, slots=True)
class LldpNeighbor:
    """The device at the far end; missing values are empty. chassis: the permanent id of a switch."""

    switch: str
    chassis: str
    port: str
    description: str
    management: str

    @property
    def position(self) -> tuple[str, str]:
        """What changes when a cable is moved."""
        return self.chassis or self.switch, self.port


def parse_neighbors(text: str) -> dict[str, LldpNeighbor]:
    """Returns the neighbor of each interface. If there are several (a hub, or CDP beside LLDP), the first from LLDP.

    Raises ValueError if the text is not JSON. Entries in another format are skipped.
    """
    try:
        whole = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    found: dict[str, tuple[bool, LldpNeighbor]] = {}
    for name, facts in _interface_entries(whole):
        via = _text_value(facts.get("via")) in ("", "LLDP")
        neighbour = _parse_neighbor(facts)
        if (
            (neighbour.switch or neighbour.chassis)
            and len(found) < MAX_NEIGHBORS
            and (name not in found or via > found[name][0])
        ):
            found[name] = via, neighbour
    return {name: neighbour for name, (_, neighbour) in found.items()}


def _interface_entries(whole: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and content of each interface, whatever the shape."""
    for lldp in _as_list(_get_key(whole, "lldp")):
        for entry in _as_list(_get_key(lldp, "interface")):
            if not isinstance(entry, dict):
                continue
            if "chassis" in entry or "port" in entry:
                yield _text_value(entry.get("name")), entry
                continue
            for name, facts in entry.items():
                yield from ((name[:_MAX_TEXT], one) for one in _as_list(facts) if isinstance(one, dict))


def _parse_neighbor(facts: Mapping[str, Any]) -> LldpNeighbor:
    chassis, name = _parse_chassis(facts.get("chassis"))
    port = _first_of(facts.get("port"))
    description, number = _text_value(_get_key(port, "descr")), _text_value(_get_key(port, "id"))
    # if a port is identified by an address, its description is the name that people use
    address = _get_key(_first_of(_get_key(port, "id")), "type") == "mac"
    return LldpNeighbor(
        switch=name,
        chassis=_text_value(_get_key(chassis, "id")),
        port=description if address and description else number or description,
        description=description,
        management=_text_value(_get_key(chassis, "mgmt-ip")),
    )


def _parse_chassis(found: Any) -> tuple[Any, str]:
    """Facts and name: `{"sw1": {...}}` where it has a name, `{"id": ...}` where it has none, `[{"name": ...}]`."""
    chassis = _first_of(found)
    if not isinstance(chassis, dict):
        return {}, ""
    if "id" in chassis:
        return chassis, _text_value(chassis.get("name"))
    return next(((_first_of(facts), _printable(name)) for name, facts in chassis.items()), ({}, ""))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _first_of(value: Any) -> Any:
    return next(iter(_as_list(value)), None)


def _get_key(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text_value(value: Any) -> str:
    """A text, the `value` of an object, or the first of several."""
    one = _first_of(value)
    if isinstance(one, dict):
        one = one.get("value")
    return _printable(one) if isinstance(one, str) else str(one) if type(one) is int else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT]).strip()


_MAX_OUTPUT = 4 << 20
"""Most bytes of one response. Chosen: 16 KiB for each of the most interfaces."""
_TIMEOUT_S = 20.0
"""Seconds that lldpcli may take. Chosen: it responds in milliseconds, and waits for a daemon that hangs."""
_TIMESTAMP = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ")
"""Time at the start of a line of lldpcli; removed so that the same reason stays the same text."""
_MAX_EVENTS = 20
"""Most events of one read. Chosen: replacing a switch changes 2 to 10 ports of a node."""


@dataclass
class Lldp(Collector):
    """Attributes of ports: peer_switch, peer_port, peer_description, peer_mgmt, peer_chassis; read every `every`
    seconds.

    A neighbor that falls silent is kept: that is where the cable was. socket: of lldpd, if it is not the default.
    """

    name: ClassVar[str] = "lldp"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("link_peer",)
    interval: float = 5.0
    command: Path = Path("/usr/sbin/lldpcli")
    socket: str = ""
    every: float = 60.0
    root: Path = Path("/sys/class/net")
    rdma_exclude: tuple[str, ...] = SOFTWARE_RDMA
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _poller: _NeighborPoller | None = field(default=None, init=False, repr=False)
    _neighbors: dict[str, LldpNeighbor] = field(default_factory=dict, init=False, repr=False)
    _changed: bool = field(default=False, init=False, repr=False)

    def open(self, node: str) -> None:
        """Starts the poller of lldpd. Raises NoData if lldpcli is missing or fails."""
        self._node = node
        if not self.command.is_file():
            raise NoData(f"{self.command}: not found; install lldpd to get the switch port of each interface")
        self.close()
        at = ("-u", self.socket) if self.socket else ()
        asker = _NeighborPoller((str(self.command), *at, "-f", "json", "show", "neighbors"), self.every)
        if trouble := asker.start(self.deadline / 2):
            raise NoData(_unavailable(trouble))
        self._poller = asker

    def read(self) -> tuple[Reading, ...]:
        """Returns the changes since the last response; does not wait for one."""
        assert self._poller is not None, "read before open"
        found, trouble = self._poller.take_result()
        if trouble:
            raise NoData(_unavailable(trouble))
        events: list[Event] = []
        for interface, neighbour in (found or {}).items():
            before = self._neighbors.get(interface)
            if before == neighbour or not (self.root / interface).exists():
                continue
            if before is not None and before.position != neighbour.position:
                if len(events) >= _MAX_EVENTS:
                    continue  # unchanged: reported at a later read
                events.append(self._moved_event(interface, before, neighbour))
            self._neighbors[interface], self._changed = neighbour, True
        return (Reading("nic", (), {}, tuple(events)),) if events or self._changed else ()

    def inventory_changed(self) -> bool:
        """Returns whether a neighbor changed since the last call."""
        news, self._changed = self._changed, False
        return news

    def inventory(self) -> Mapping[str, Device]:
        """Returns the ports with the switch port at the other end."""
        entities = self._port_entities()
        return {
            entities[i]: Device((f"node:{self._node}",), _peer_attributes(n))
            for i, n in self._neighbors.items()
            if i in entities
        }

    def close(self) -> None:
        """Stops the poller."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def _port_entities(self) -> dict[str, str]:
        """Returns the entity of each interface, with the name that the collectors of its state use."""
        rdma = (
            rdma_ports_by_interface(self.root.parent / "infiniband", self.root, self.rdma_exclude)
            if self._neighbors
            else {}
        )
        present = [i for i in self._neighbors if (self.root / i).exists()]
        return {i: f"port:{self._node}.{rdma[i].name if i in rdma else i}" for i in present}

    def _moved_event(self, interface: str, before: LldpNeighbor, now: LldpNeighbor) -> Event:
        entity = self._port_entities()[interface]
        data = {"peer": now.switch, "guid": now.chassis, "port": now.port}
        data |= {"from": before.switch, "from_guid": before.chassis, "from_port": before.port}
        return Event(self._now(), entity, "link_peer", data)


def _unavailable(trouble: str) -> str:
    return f"{trouble}; expected a running lldpd and access to its socket (group _lldpd, or root)"


class _NeighborPoller:
    """Queries lldpd once, to find out whether it responds, then at a fixed interval in a thread."""

    def __init__(self, command: tuple[str, ...], every: float) -> None:
        self._arguments, self._every = command, every
        self._command = CommandRunner(_TIMEOUT_S, _MAX_OUTPUT)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._neighbors: dict[str, LldpNeighbor] | None = None
        self._error = ""

    def start(self, seconds: float) -> str:
        """Waits `seconds` for the first response. Returns why there is none; then no thread is started."""
        self._command.limit = seconds
        self._neighbors, trouble = self._query()
        self._command.limit = _TIMEOUT_S
        if not trouble:
            threading.Thread(target=self._run, name="lldp poller", daemon=True).start()
        return trouble

    def take_result(self) -> tuple[dict[str, LldpNeighbor] | None, str]:
        """Returns the newest response, once, and the error of the last query."""
        with self._lock:
            found, self._neighbors = self._neighbors, None
            return found, self._error

    def stop(self) -> None:
        """Stops the thread and the running command."""
        self._stop.set()
        self._command.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            found, trouble = self._query()
            with self._lock:
                self._neighbors, self._error = found, trouble

    def _query(self) -> tuple[dict[str, LldpNeighbor] | None, str]:
        try:
            output = self._command.run(self._arguments)
            if output.code:
                last = (output.errors.strip() or "exited without output").splitlines()[-1]
                return None, f"{self._arguments[0]}: {_TIMESTAMP.sub('', last)[:200]}"
            return parse_neighbors(output.text), ""
        except CommandError as error:
            return None, str(error)
        except Exception as fault:  # noqa: BLE001 - one broken response must not end the thread; it is reported
            return None, f"{self._arguments[0]}: cannot parse its output: {type(fault).__name__}: {fault}"


def _peer_attributes(neighbour: LldpNeighbor) -> dict[str, object]:
    n = neighbour
    reported_values = {
        "peer_switch": n.switch,
        "peer_chassis": n.chassis,
        "peer_port": n.port,
        "peer_description": n.description,
        "peer_mgmt": n.management,
    }
    return {name: text for name, text in reported_values.items() if text}
