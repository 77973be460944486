"""The fabric as it was seen so far: which switch is called what, its ports and their peers, and what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from agents.collector import Device
from agents.collectors.fabric.tool_output import Facts, Link, Peer, Place, leaves, names
from agents.collectors.nic.link_state import Edges
from pipeline.model.records import Event

MOST_PORTS = 16_384
"""Most ports that are followed; chosen: their inventory fits one answer of a worker (8 MiB). `include` divides more."""
MOST_EVENTS = 500
"""Most events of one look; chosen: a leaf has 64 ports. What more changed is told at the next looks."""
_WORDS = ("no change", "down", "init", "armed", "active", "active defer")
_ACTIVE = 4


@dataclass
class View:
    """include, exclude: shell patterns of switches' names; `include` wins."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    ports: dict[Place, Link] = field(default_factory=dict)
    entities: dict[Place, str] = field(default_factory=dict)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    left_out: int = 0
    _names: dict[str, str] = field(default_factory=dict)
    _leaves: set[str] = field(default_factory=set)
    _present: set[str] = field(default_factory=set)
    _edges: Edges = field(default_factory=Edges)
    _news: bool = False

    def look(self, time: int, links: Sequence[Link]) -> list[Event]:
        """Takes a pass over all links; what changed, at most MOST_EVENTS.

        A port that never had a peer is nobody's link and left alone; one that lost its peer keeps its last one.
        """
        self._learn(links)
        self.left_out = 0
        before_look = self._told()
        events = self._switches(time, {link.guid for link in links})
        for link in links:
            before, room = self.ports.get(link.place), len(events) < MOST_EVENTS
            if not self._follows(link, before):
                continue
            if before and before.peer and link.peer and before.peer.guid != link.peer.guid:
                if not room:
                    continue  # as it was: told at a later look
                events.append(self._peer(time, before, link))
            self.ports[link.place] = _remembered(before, link)
            entity = self.entities.setdefault(link.place, self.entity(link.place))
            state = _WORDS[int(link.logical)] if link.logical == link.logical else ""
            if room and (event := self._edges.look(time, entity, state, link.logical == _ACTIVE)):
                events.append(event)
        self._forget_moved(links)
        self._news = self._news or self._told() != before_look
        return events

    def learn(self, facts: Mapping[str, Facts]) -> None:
        """Takes what the topology says of switches."""
        self._news = self._news or facts != self.facts
        self.facts = facts

    def renewed(self) -> bool:
        """Whether the inventory tells anything new since this was last asked."""
        news, self._news = self._news, False
        return news

    def inventory(self) -> dict[str, Device]:
        """Ports below their switches; of switches what the topology said."""
        found: dict[str, Device] = {}
        for place, link in self.ports.items():
            switch = self._switch(link.guid)
            found[self.entities[place]] = Device((switch,), _facts(link, self._names[link.guid]))
            if switch not in found:
                found[switch] = Device((), self._of_switch(link))
        return found

    def entity(self, place: Place) -> str:
        """`port:SWITCH.PORT`."""
        return f"port:{self._names[place[0]]}.{place[1]}"

    def _switch(self, guid: str) -> str:
        return f"{'leaf' if guid in self._leaves else 'spine'}:{self._names[guid]}"

    def _learn(self, links: Iterable[Link]) -> None:
        """Names and kinds. Who once was a leaf stays one: a row without power leaves a switch without hosts."""
        links = list(links)
        descriptions = {link.guid: link.description for link in links}
        fresh = names(descriptions)
        gone = {guid: name for guid, name in self._names.items() if guid not in fresh and name not in fresh.values()}
        renamed = {guid for guid, name in fresh.items() if self._names.get(guid, name) != name}
        self._names = {**gone, **fresh}
        self._leaves |= leaves(links)
        for place in [p for p in self.ports if p[0] in renamed or p[0] not in self._names]:
            del self.ports[place]
            self.entities.pop(place, None)

    def _forget_moved(self, links: Sequence[Link]) -> None:
        """A peer that is seen on one port is no longer the one that another port lost."""
        at = {(link.peer.guid, link.peer.port): link.place for link in links if link.peer}
        silent = {link.place for link in links if link.peer is None} & self.ports.keys()
        for place in silent:
            peer = self.ports[place].peer
            if peer and at.get((peer.guid, peer.port), place) != place:
                self.ports[place] = replace(self.ports[place], peer=None)

    def _told(self) -> dict[Place, tuple[int, Peer | None]]:
        """What the inventory says of ports that may change while they stay the same ports."""
        return {place: (link.lid, link.peer) for place, link in self.ports.items()}

    def _follows(self, link: Link, before: Link | None) -> bool:
        """Whether the port is one of ours: it has or had a peer, its switch is wanted, and there is room."""
        if before is not None:
            return True
        name = self._names[link.guid]
        chosen = any(fnmatch(name, p) for p in self.include)
        barred = not chosen and (bool(self.include) or any(fnmatch(name, p) for p in self.exclude))
        if link.peer is None or barred:
            return False
        full = len(self.ports) >= MOST_PORTS
        self.left_out += full
        return not full

    def _switches(self, time: int, seen: set[str]) -> list[Event]:
        """Switches that went and came back; those of the first look are no news."""
        ours = {guid for guid, _ in self.ports}
        events: list[Event] = []
        for guid in sorted(ours & (self._present ^ seen) if self._present else ()):
            if len(events) >= MOST_EVENTS // 2:
                seen = seen ^ {guid}  # as it was: told at a later look
                continue
            ports = sum(1 for place in self.ports if place[0] == guid)
            state = "seen" if guid in seen else "gone"
            events.append(
                Event(time, self._switch(guid), "switch_state", {"state": state, "guid": guid, "ports": ports})
            )
        self._present = seen
        return events

    def _peer(self, time: int, before: Link, link: Link) -> Event:
        assert before.peer is not None
        assert link.peer is not None
        now, was = link.peer, before.peer
        data: dict[str, object] = {"peer": now.description, "guid": now.guid, "port": now.port}
        data |= {"from": was.description, "from_guid": was.guid, "from_port": was.port}
        return Event(time, self.entities[link.place], "link_peer", data)

    def _of_switch(self, link: Link) -> dict[str, object]:
        facts = self.facts.get(link.guid)
        found: dict[str, object] = {"guid": link.guid, "lid": link.lid, "description": link.description}
        if facts is not None:
            told = {"vendor_id": facts.vendor, "device_id": facts.device, "sys_image_guid": facts.system}
            found |= {"ports": facts.ports, **{name: text for name, text in told.items() if text}}
        return found


def _remembered(before: Link | None, link: Link) -> Link:
    """The port as it is now, with the peer that it had if it has none: that is the cable to look at."""
    if link.peer is not None or before is None:
        return link
    return replace(link, peer=before.peer)


def _facts(link: Link, switch: str) -> dict[str, object]:
    """The attributes of a port; `peer_guid` is what the node's own port calls `port_guid`."""
    found: dict[str, object] = {"switch": switch, "guid": link.guid, "port": link.port, "lid": link.lid}
    if link.peer is not None:
        found |= {
            "peer_guid": link.peer.guid,
            "peer_port": link.peer.port,
            "peer_lid": link.peer.lid,
            "peer_description": link.peer.description,
        }
    return found
