"""Pairs the two ports of each cable by port GUID, whichever port is reported first.

A node's port has its `port_guid`; a switch port, reported by the fabric agent, has the `peer_guid` of the port it is
cabled to. Both get the attribute `peer`, and the node's port gets its leaf as a parent unless it has one. Links between
switches are paired by the GUID of the switch and the port number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeline.model.topology import Topology, kind_of

PEER = "peer"
"""Attribute with the entity at the far end; always set here, never taken from an inventory."""
Key = tuple[str, int | None]
"""GUID of a port; with the port number if the GUID is a switch's."""
Parents = dict[str, tuple[str, ...]]
Facts = dict[str, Mapping[str, object]]


def port_key(facts: Mapping[str, object]) -> Key | None:
    """The key by which the far end refers to this port; None if unknown."""
    if isinstance(own := facts.get("port_guid"), str):
        return own, None
    switch, number = facts.get("guid"), facts.get("port")
    if isinstance(facts.get("peer_guid"), str) and isinstance(switch, str) and isinstance(number, int):
        return switch, number
    return None


def peer_keys(facts: Mapping[str, object]) -> tuple[Key, ...]:
    """Possible keys of the port at the far end: a node's port by its GUID alone, a switch port with its number."""
    far, number = facts.get("peer_guid"), facts.get("peer_port")
    if not isinstance(far, str):
        return ()
    return ((far, None), (far, number)) if isinstance(number, int) else ((far, None),)


class Links:
    """Pairs ports of the topology and of new inventories. Memory: two names per port that has a GUID."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._by_key: dict[Key, str] = {}
        self._key_of: dict[str, Key] = {}
        self._peer_keys: dict[str, tuple[Key, ...]] = {}
        self._named_by: dict[Key, str] = {}
        self._added_leaf: dict[str, str] = {}
        topology.merge(*self.join_inventory({}, {e: f for e, f in topology.attributes.items() if kind_of(e) == "port"}))

    def join_inventory(
        self, parents: Mapping[str, Sequence[str]], facts: Mapping[str, Mapping[str, object]]
    ) -> tuple[Parents, Facts]:
        """Parents and attributes of an inventory, completed with what pairing changes, at the far ends too."""
        all_parents = {e: tuple(p) for e, p in parents.items()}
        all_facts = dict(facts)
        touched = {e: None for e, f in facts.items() if kind_of(e) == "port" and (port_key(f) or e in self._key_of)}
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
        lent = self._added_leaf.pop(entity, None)
        said = tuple(p for p in over if p != lent) if entity not in parents else over
        if "port_guid" in facts and peer is not None and not any(kind_of(p) == "leaf" for p in said):
            leaf = self._leaf_over(peer, parents)
            if leaf is not None:
                self._added_leaf[entity] = leaf
                said = (*said, leaf)
        if said != over:
            parents[entity] = said

    def _leaf_over(self, port: str, parents: Parents) -> str | None:
        over = parents.get(port) or self.topology.parents.get(port, ())
        return next((p for p in over if kind_of(p) == "leaf"), None)

    def _peers_of(self, entities: Iterable[str]) -> dict[str, None]:
        return {peer: None for e in entities if (peer := self._peer_of(e)) is not None}

    def _peer_of(self, entity: str) -> str | None:
        """The port at the other end: the one that this port names, else the one that names it."""
        named: Iterable[str | None] = (self._by_key.get(key) for key in self._peer_keys.get(entity, ()))
        naming = self._named_by.get(self._key_of[entity]) if entity in self._key_of else None
        return next((e for e in (*named, naming) if e is not None and e != entity), None)

    def _index(self, entity: str, facts: Mapping[str, object]) -> None:
        """Updates the keys of a port; if two ports claim one GUID, the newer wins."""
        if (old := self._key_of.pop(entity, None)) is not None and self._by_key.get(old) == entity:
            del self._by_key[old]
        for key in self._peer_keys.pop(entity, ()):
            if self._named_by.get(key) == entity:
                del self._named_by[key]
        if (own := port_key(facts)) is not None:
            self._key_of[entity], self._by_key[own] = own, entity
        if keys := peer_keys(facts):
            self._peer_keys[entity] = keys
            self._named_by |= dict.fromkeys(keys, entity)
