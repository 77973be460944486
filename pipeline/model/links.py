"""The two ends of a cable, put together by the GUID of the node's port: each learns the other, whichever comes first.

A node's own port bears its `port_guid`; a switch's port, read by the agent of the fabric, the `peer_guid` of what it is
cabled to. Both get the attribute `peer`, and the node's port its leaf as a parent, where nobody has named one. Links
between switches are joined in the same way, by the GUID of the switch and the number of the port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeline.model.topology import Topology, kind_of

PEER = "peer"
"""The attribute that names the entity at the far end; it is always ours."""
Key = tuple[str, int | None]
"""GUID of a port; with its number where the GUID is that of a switch."""
Parents = dict[str, tuple[str, ...]]
Facts = dict[str, Mapping[str, object]]


def own_key(facts: Mapping[str, object]) -> Key | None:
    """By what the far end calls this port; None where that is not known."""
    if isinstance(own := facts.get("port_guid"), str):
        return own, None
    switch, number = facts.get("guid"), facts.get("port")
    if isinstance(facts.get("peer_guid"), str) and isinstance(switch, str) and isinstance(number, int):
        return switch, number
    return None


def far_keys(facts: Mapping[str, object]) -> tuple[Key, ...]:
    """What the port at the far end may be called: a node's by its GUID alone, a switch's with its number."""
    far, number = facts.get("peer_guid"), facts.get("peer_port")
    if not isinstance(far, str):
        return ()
    return ((far, None), (far, number)) if isinstance(number, int) else ((far, None),)


class Links:
    """Joins what a topology holds and what comes. Memory: a line of two names for each port that has a GUID."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._by_key: dict[Key, str] = {}
        self._key_of: dict[str, Key] = {}
        self._far: dict[str, tuple[Key, ...]] = {}
        self._near: dict[Key, str] = {}
        self._lent: dict[str, str] = {}
        topology.merge(*self.joined({}, {e: f for e, f in topology.attributes.items() if kind_of(e) == "port"}))

    def joined(
        self, parents: Mapping[str, Sequence[str]], facts: Mapping[str, Mapping[str, object]]
    ) -> tuple[Parents, Facts]:
        """The lines of an inventory, with what the join adds to them and to the far ends that they change."""
        all_parents = {e: tuple(p) for e, p in parents.items()}
        all_facts = dict(facts)
        touched = {e: None for e, f in facts.items() if kind_of(e) == "port" and (own_key(f) or e in self._key_of)}
        ends = {**touched, **self._peers_of(touched)}
        for entity in touched:
            self._index(entity, all_facts[entity])
        for entity in {**ends, **self._peers_of(touched)}:
            known = all_facts.get(entity, self.topology.attributes.get(entity))
            if known is not None:
                renewed = {k: v for k, v in known.items() if k != PEER}
                self._join(entity, all_parents, renewed)
                all_facts[entity] = renewed
        return all_parents, all_facts

    def _join(self, entity: str, parents: Parents, facts: dict[str, object]) -> None:
        peer = self._peer_of(entity)
        if peer is not None:
            facts[PEER] = peer
        over = parents.get(entity, self.topology.parents.get(entity, ()))
        lent = self._lent.pop(entity, None)
        said = tuple(p for p in over if p != lent) if entity not in parents else over
        if "port_guid" in facts and peer is not None and not any(kind_of(p) == "leaf" for p in said):
            leaf = self._leaf_over(peer, parents)
            if leaf is not None:
                self._lent[entity] = leaf
                said = (*said, leaf)
        if said != over:
            parents[entity] = said

    def _leaf_over(self, port: str, parents: Parents) -> str | None:
        over = parents.get(port) or self.topology.parents.get(port, ())
        return next((p for p in over if kind_of(p) == "leaf"), None)

    def _peers_of(self, entities: Iterable[str]) -> dict[str, None]:
        return {peer: None for e in entities if (peer := self._peer_of(e)) is not None}

    def _peer_of(self, entity: str) -> str | None:
        """The other end: whom this one names, else who names this one."""
        named: Iterable[str | None] = (self._by_key.get(key) for key in self._far.get(entity, ()))
        naming = self._near.get(self._key_of[entity]) if entity in self._key_of else None
        return next((e for e in (*named, naming) if e is not None and e != entity), None)

    def _index(self, entity: str, facts: Mapping[str, object]) -> None:
        """Renews what is known of an end; of two that claim one GUID the newer holds."""
        if (old := self._key_of.pop(entity, None)) is not None and self._by_key.get(old) == entity:
            del self._by_key[old]
        for key in self._far.pop(entity, ()):
            if self._near.get(key) == entity:
                del self._near[key]
        if (own := own_key(facts)) is not None:
            self._key_of[entity], self._by_key[own] = own, entity
        if keys := far_keys(facts):
            self._far[entity] = keys
            self._near |= dict.fromkeys(keys, entity)
