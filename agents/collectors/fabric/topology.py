"""The fabric as seen so far: names of switches, their ports and peers, and what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from agents.collector import Device
from agents.collectors.fabric.tool_output import (
    LinkPeer,
    PortKey,
    SwitchInfo,
    SwitchPort,
    find_leaves,
)
from agents.collectors.nic.link_state import LinkStateEvents
from pipeline.model.records import Event
from pipeline.model.switch_names import unique_switch_names

MAX_PORTS = 16_384
"""Most ports. Chosen: their inventory fits one message of a worker (8 MiB). `include` divides larger fabrics among
agents."""
MAX_EVENTS = 500
"""Most events of one read. Chosen: a leaf has 64 ports. Further changes are reported at the next reads."""
_STATE_NAMES = ("no change", "down", "init", "armed", "active", "active defer")
_ACTIVE = 4


@dataclass
class FabricTopology:
    """include, exclude: shell patterns of switch names; `include` takes precedence."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    ports: dict[PortKey, SwitchPort] = field(default_factory=dict)
    entities: dict[PortKey, str] = field(default_factory=dict)
    switches: Mapping[str, SwitchInfo] = field(default_factory=dict)
    left_out: int = 0
    _names: dict[str, str] = field(default_factory=dict)
    _leaves: set[str] = field(default_factory=set)
    _present: set[str] = field(default_factory=set)
    _link_events: LinkStateEvents = field(default_factory=LinkStateEvents)
    _changed: bool = False

    def update_links(self, time: int, links: Sequence[SwitchPort]) -> list[Event]:
        """Updates all links from one poll. Returns at most MAX_EVENTS events of changes.

        A port that never had a peer is ignored. A port that lost its peer keeps its last one.
        """
        self._update_names(links)
        self.left_out = 0
        before_look = self._inventory_state()
        events = self._switch_events(time, {link.guid for link in links})
        for link in links:
            before, room = self.ports.get(link.key), len(events) < MAX_EVENTS
            if not self._is_selected(link, before):
                continue
            if before and before.peer and link.peer and before.peer.guid != link.peer.guid:
                if not room:
                    continue  # unchanged: reported at a later read
                events.append(self._peer_event(time, before, link))
            self.ports[link.key] = _with_last_peer(before, link)
            entity = self.entities.setdefault(link.key, self.port_entity(link.key))
            state = _STATE_NAMES[int(link.logical)] if link.logical == link.logical else ""
            if room and (event := self._link_events.update(time, entity, state, link.logical == _ACTIVE)):
                events.append(event)
        self._drop_moved_peers(links)
        self._changed = self._changed or self._inventory_state() != before_look
        return events

    def update_switches(self, facts: Mapping[str, SwitchInfo]) -> None:
        """Updates the properties of switches."""
        self._changed = self._changed or facts != self.switches
        self.switches = facts

    def inventory_changed(self) -> bool:
        """Returns whether the inventory changed since the last call."""
        news, self._changed = self._changed, False
        return news

    def inventory(self) -> dict[str, Device]:
        """Returns ports below their switches, and switches with their properties."""
        found: dict[str, Device] = {}
        for place, link in self.ports.items():
            switch = self._switch_entity(link.guid)
            found[self.entities[place]] = Device((switch,), _port_attributes(link, self._names[link.guid]))
            if switch not in found:
                found[switch] = Device((), self._switch_attributes(link))
        return found

    def port_entity(self, place: PortKey) -> str:
        """Returns `port:SWITCH.PORT`."""
        return f"port:{self._names[place[0]]}.{place[1]}"

    def _switch_entity(self, guid: str) -> str:
        return f"{'leaf' if guid in self._leaves else 'spine'}:{self._names[guid]}"

    def _update_names(self, links: Iterable[SwitchPort]) -> None:
        """Updates names and kinds. A leaf stays a leaf: a rack without power leaves a switch without hosts."""
        links = list(links)
        descriptions = {link.guid: link.description for link in links}
        fresh = unique_switch_names(descriptions)
        gone = {guid: name for guid, name in self._names.items() if guid not in fresh and name not in fresh.values()}
        renamed = {guid for guid, name in fresh.items() if self._names.get(guid, name) != name}
        self._names = {**gone, **fresh}
        self._leaves |= find_leaves(links)
        for place in [p for p in self.ports if p[0] in renamed or p[0] not in self._names]:
            del self.ports[place]
            self.entities.pop(place, None)

    def _drop_moved_peers(self, links: Sequence[SwitchPort]) -> None:
        """Removes the last peer of a port if that peer is now on another port."""
        at = {(link.peer.guid, link.peer.port): link.key for link in links if link.peer}
        silent = {link.key for link in links if link.peer is None} & self.ports.keys()
        for place in silent:
            peer = self.ports[place].peer
            if peer and at.get((peer.guid, peer.port), place) != place:
                self.ports[place] = replace(self.ports[place], peer=None)

    def _inventory_state(self) -> dict[PortKey, tuple[int, LinkPeer | None]]:
        """Returns what may change in the inventory while the ports stay the same."""
        return {place: (link.lid, link.peer) for place, link in self.ports.items()}

    def _is_selected(self, link: SwitchPort, before: SwitchPort | None) -> bool:
        """Returns whether the port is included: it has or had a peer, its switch is selected, and there is room."""
        if before is not None:
            return True
        name = self._names[link.guid]
        chosen = any(fnmatch(name, p) for p in self.include)
        barred = not chosen and (bool(self.include) or any(fnmatch(name, p) for p in self.exclude))
        if link.peer is None or barred:
            return False
        full = len(self.ports) >= MAX_PORTS
        self.left_out += full
        return not full

    def _switch_events(self, time: int, seen: set[str]) -> list[Event]:
        """Returns events of switches that disappeared or came back; none at the first poll."""
        ours = {guid for guid, _ in self.ports}
        events: list[Event] = []
        for guid in sorted(ours & (self._present ^ seen) if self._present else ()):
            if len(events) >= MAX_EVENTS // 2:
                seen = seen ^ {guid}  # unchanged: reported at a later read
                continue
            ports = sum(1 for place in self.ports if place[0] == guid)
            state = "seen" if guid in seen else "gone"
            events.append(
                Event(time, self._switch_entity(guid), "switch_state", {"state": state, "guid": guid, "ports": ports})
            )
        self._present = seen
        return events

    def _peer_event(self, time: int, before: SwitchPort, link: SwitchPort) -> Event:
        assert before.peer is not None
        assert link.peer is not None
        now, was = link.peer, before.peer
        data: dict[str, object] = {"peer": now.description, "guid": now.guid, "port": now.port}
        data |= {"from": was.description, "from_guid": was.guid, "from_port": was.port}
        return Event(time, self.entities[link.key], "link_peer", data)

    def _switch_attributes(self, link: SwitchPort) -> dict[str, object]:
        facts = self.switches.get(link.guid)
        found: dict[str, object] = {"guid": link.guid, "lid": link.lid, "description": link.description}
        if facts is not None:
            reported_values = {
                "vendor_id": facts.vendor,
                "device_id": facts.device,
                "sys_image_guid": facts.system_guid,
            }
            found |= {"ports": facts.ports, **{name: text for name, text in reported_values.items() if text}}
        return found


def _with_last_peer(before: SwitchPort | None, link: SwitchPort) -> SwitchPort:
    """Returns the port with its last peer if it has none now: that is the cable to check."""
    if link.peer is not None or before is None:
        return link
    return replace(link, peer=before.peer)


def _port_attributes(link: SwitchPort, switch: str) -> dict[str, object]:
    """Returns the attributes of a port. `peer_guid` is the `port_guid` of the node's own port."""
    found: dict[str, object] = {"switch": switch, "guid": link.guid, "port": link.port, "lid": link.lid}
    if link.peer is not None:
        found |= {
            "peer_guid": link.peer.guid,
            "peer_port": link.peer.port,
            "peer_lid": link.peer.lid,
            "peer_description": link.peer.description,
        }
    return found
