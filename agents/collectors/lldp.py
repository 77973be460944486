"""The far end of Ethernet links: switch and port of each interface, as lldpd hears them. It tells no signal."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.sources.command import Command, CommandError
from agents.sources.lldp import Neighbour, parse_neighbours
from agents.sources.nics.ports import SOFTWARE, owners
from pipeline.model.records import Event

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
