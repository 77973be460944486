"""Factors: what may fail and reach several devices, and which devices each reaches. One index over one topology.

A factor is a node, what contains or supplies nodes (rack, row, pod, CDU, PDU), the network (leaf, rail), work (job,
stage), a software version, or a version that changed recently. Each counts its members in units of one kind, so that
eight hot GPUs of a node are one unit of a rack. Entities that the topology does not know belong to the node, rack and
job that their name or their labels say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.links import PEER
from pipeline.model.places import guess_node_by_name
from pipeline.model.rank_changes import RankChanges
from pipeline.model.records import SECOND
from pipeline.model.topology import WORK, Topology, kind_of

SYMPTOM_FAMILY = "straggler"
"""The family that is a symptom of physical faults (link, power, coolant, clocks) and causes none."""
_HEAT = frozenset({"coolant", "thermal", SYMPTOM_FAMILY})
_NETWORK = frozenset({"link", SYMPTOM_FAMILY})
_SOFTWARE = frozenset({"xid", "host", "memory", "link", "telemetry", SYMPTOM_FAMILY})  # a hung driver is silent too


@dataclass(frozen=True, slots=True)
class FactorKind:
    """What one kind of factor does.

    per_day:  faults of one such factor a day (prior). unit: kind of the members that are counted; "": its parts.
    families: of detectors that find its symptoms; None: all. together: families that one fault shows together.
    silence:  weight of members that show nothing: 1, or less where most may rightly show nothing.
    """

    per_day: float
    unit: str
    families: frozenset[str] | None
    together: frozenset[str] = frozenset()
    silence: float = 1.0


FACTOR_KINDS: Mapping[str, FactorKind] = {
    # power 0.14, CPU, board and chassis 0.09 each per 1M GPU-hours (Llama 3, table 5), of 8 GPUs
    "node": FactorKind(8e-5, "", None),
    # a leak 0.02 and a power shelf 0.01 per rack-year (assumed)
    "rack": FactorKind(8e-5, "node", _HEAT | {"power", "telemetry"}, _HEAT),
    # recirculation 0.5 per hall-month (assumed), five rows
    "row": FactorKind(3e-3, "node", frozenset({"thermal", SYMPTOM_FAMILY}), frozenset({"thermal", SYMPTOM_FAMILY})),
    # loss of a pump 0.1 per year (assumed)
    "cdu": FactorKind(2.7e-4, "node", _HEAT, _HEAT),
    # a trip 0.02 per year (assumed)
    "pdu": FactorKind(5.5e-5, "node", frozenset({"power", "telemetry", SYMPTOM_FAMILY})),
    # 0.051 % per month (HPN, SIGCOMM 2024), and 0.01 % gray (assumed)
    "leaf": FactorKind(2e-5, "port", _NETWORK | {"telemetry"}, _NETWORK),
    "rail": FactorKind(2e-5, "port", _NETWORK, _NETWORK),  # as a leaf
    "pod": FactorKind(2e-5, "node", _NETWORK | {"telemetry"}, _NETWORK),  # its spines, as a leaf
    # hangs 0.33, dataloader and storage 0.6 per 1M GPU-hours (Llama 3, table 5), of 256 GPUs: 6e-3; 42 % of jobs are
    # slow at some time (Lin et al., OSDI 2025), of which detectors of single ranks report a tenth (assumed)
    "job": FactorKind(2e-2, "node", frozenset({SYMPTOM_FAMILY}), silence=0.35),
    "stage": FactorKind(5e-3, "node", frozenset({SYMPTOM_FAMILY}), silence=0.35),
    # software 2.5 per 1M GPU-hours (Llama 3, table 5), of which a hundredth is a version that had run well (assumed)
    "version": FactorKind(1e-4, "node", _SOFTWARE, silence=0.35),
    # one of a hundred roll-outs is bad, on its first day (assumed)
    "change": FactorKind(1e-2, "node", _SOFTWARE, silence=0.35),
}
"""Kind -> what it does. A prior that is ten times wrong changes the answer by a third of a member."""
_CONTAINERS = frozenset({"rack", "row", "cdu", "pdu", "pod"})
_NETWORKS = frozenset({"leaf", "rail"})
_PLACES = _CONTAINERS | {"leaf", "rail", "loop"}
_VERSIONS: Mapping[str, frozenset[str]] = {
    "node": frozenset({"nvidia_driver", "kernel", "bios_version", "mlx5_core_driver", "operating_system", "agent"}),
    "gpu": frozenset({"driver", "vbios", "gsp_firmware"}),
    "port": frozenset({"firmware", "driver_version"}),
}
"""Kind of device -> attributes that are versions."""
NETWORK_VERSIONS = ("firmware=", "driver_version=", "mlx5_core_driver=")
"""Versions that only show at ports; all others never do. With names of a port's attributes."""
CHANGE_WINDOW = 86_400 * SECOND
"""So long is a version a recent change on a node: faults of new ones show under the first full load. Chosen."""
_WIDEST = 0.9  # a factor above more of the fleet than this separates nothing from nothing
_RACK_NAME = re.compile(r"^(r(?:ack)?-?\d+)[-_.]", re.IGNORECASE)
"""Rack in the name of a node: `r12-n03`, `rack7-4`."""
_NEVER = 1 << 62
MOST_REMEMBERED = 100_000
"""Ranks with findings of which the GPU is remembered; beyond, those of ended jobs are forgotten. Chosen: 20 MB."""
_LABELS = ("rack", "row", "leaf", "pod", "cdu", "pdu", "job")


@dataclass(slots=True)
class FactorIndex:
    """Factors over a topology; rebuilt when it changes.

    units:   factor -> its members, sorted. number: kind -> how many there are.
    changed: (node, attribute, version) -> when it changed, while CHANGE_WINDOW lasts.
    """

    topology: Topology
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    number: Counter[str] = field(default_factory=Counter)
    changed: dict[tuple[str, str, str], int] = field(default_factory=dict)
    generation: int = 0
    _versions_seen: tuple[int, int] = (-1, -1)
    _expires: int = 0
    _fixed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _around: dict[str, frozenset[str]] = field(default_factory=dict)
    _near: dict[str, frozenset[str]] = field(default_factory=dict)
    _software: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _known: dict[str, dict[str, str]] = field(default_factory=dict)
    _chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _supplies: dict[str, frozenset[str]] = field(default_factory=dict)
    _changes: RankChanges = field(default_factory=RankChanges)
    _nodes_of: dict[str, Counter[str]] = field(default_factory=dict)  # stage or job -> node -> its ranks there
    _works: set[str] = field(default_factory=set)  # ranks, stages and jobs with parents
    _ranks: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # rank -> node, stages and jobs
    _devices: Counter[str] = field(default_factory=Counter)  # kind -> entities, of all but work
    _ran_on: dict[str, str] = field(default_factory=dict)  # rank with a finding -> its GPU, also after its job ended

    def refresh(self, time: int) -> None:
        """Rebuilds what the topology changed, and versions that are no longer recent; of changed jobs only those."""
        seen = self.topology.device_version, self.topology.version
        if self._versions_seen == seen and time < self._expires:
            return
        anew = self._versions_seen[0] != seen[0] or time >= self._expires
        if anew:
            self._chains = {}
            self._note_versions(time)
            self._count_devices()
        self._versions_seen = seen
        self.generation += 1
        self._count_work(anew)

    def _note_versions(self, time: int) -> None:
        """Finds the versions on each node, and those that differ from the ones known before."""
        found: dict[str, dict[str, str]] = {}
        for entity, facts in self.topology.attributes.items():
            names = _VERSIONS.get(kind_of(entity))
            if not names or names.isdisjoint(facts):
                continue
            node = self.topology.ancestor_of_kind(entity, "node")
            if node is not None:
                mine = found.setdefault(node, {})
                mine.update({name: str(facts[name]) for name in names & facts.keys()})
        for node, versions in found.items():
            before = self._known.get(node, {})
            for name, version in versions.items():
                if before.get(name, version) != version:
                    self.changed[node, name, version] = time
        self._known = self._known | found
        self.changed = {
            (node, name, version): at
            for (node, name, version), at in self.changed.items()
            if time - at < CHANGE_WINDOW and self._known.get(node, {}).get(name, version) == version
        }
        self._expires = min(self.changed.values(), default=_NEVER) + CHANGE_WINDOW
        self._software = {
            node: (
                *(f"version:{name}={version}" for name, version in sorted(versions.items())),
                *(f"change:{n}={v}" for n, v in sorted(versions.items()) if (node, n, v) in self.changed),
            )
            for node, versions in found.items()
        }

    def _count_devices(self) -> None:
        """Finds the members of all factors but jobs and stages."""
        units: dict[str, set[str]] = {}
        around: dict[str, set[str]] = {}
        for entity in self.topology.parents:
            kind = kind_of(entity)
            if kind == "node":
                for factor in self.above_node(entity):
                    units.setdefault(factor, set()).add(entity)
            elif kind == "port":
                node, suspect = self._nearest(entity, "node"), self.link_suspect(entity)
                for factor in self._direct(entity, _NETWORKS):
                    units.setdefault(factor, set()).add(suspect)
                    if node is not None:
                        around.setdefault(node, set()).add(factor)
        most = _WIDEST * sum(kind_of(e) == "node" for e in self.topology.parents)
        for factor in [f for f, u in units.items() if kind_of(f) in ("version", "change") and len(u) > most]:
            del units[factor]
        self._fixed = {factor: tuple(sorted(members)) for factor, members in units.items()}
        self._near = {node: frozenset(found) for node, found in around.items()}

    def _count_work(self, anew: bool) -> None:
        """Finds the nodes of all jobs and stages. anew: also of those that did not change."""
        self._supplies, parents = {}, self.topology.parents
        changed = self._changes.read(self.topology)
        if anew or changed is None:
            self._nodes_of, self._works, self._ranks, changed = {}, set(), {}, tuple(parents)
            self.units, self._around = dict(self._fixed), dict(self._near)
            self._devices = Counter(k for e in {*parents, *self._fixed} if (k := kind_of(e)) not in WORK)
        self._works -= {*changed}
        self._works |= {e for e in changed if kind_of(e) in WORK and e in parents}
        moved: dict[str, None] = {}
        for rank in changed:
            if kind_of(rank) == "rank":
                moved |= dict.fromkeys(self._move_rank(rank))
        self.units, empty = dict(self.units), frozenset[str]()
        for work in moved:
            if nodes := self._nodes_of.get(work):
                self.units[work] = tuple(sorted(nodes))
                self._around[work] = empty.union(*(self._near.get(node, empty) for node in nodes))
            else:
                self.units.pop(work, None)
                self._around.pop(work, None)
        self.number = self._devices + Counter(kind_of(e) for e in {*self._works, *self._nodes_of})

    def _move_rank(self, rank: str) -> tuple[str, ...]:
        """Counts a rank on its present node; returns the stages and jobs that it left or joined."""
        before, left = self._ranks.pop(rank, ("", ()))
        for work in left:
            self._nodes_of[work][before] -= 1
            if not self._nodes_of[work][before]:
                del self._nodes_of[work][before]
            if not self._nodes_of[work]:
                del self._nodes_of[work]
        if rank not in self.topology.parents:
            return left
        gpu = self._nearest(rank, "gpu")
        if (node := self.topology.ancestor_of_kind(gpu or rank, "node")) is None:
            return left
        works = tuple(dict.fromkeys(self._direct(rank, WORK)))
        self._ranks[rank] = node, works
        for work in works:
            self._nodes_of.setdefault(work, Counter())[node] += 1
        return *left, *works

    def _nearest(self, entity: str, kind: str) -> str | None:
        """Returns the parent of a kind, else the ancestor. Parents first, as ports and ranks share no ancestors."""
        known = next((e for e in self.topology.parents[entity] if kind_of(e) == kind), None)
        return known or self.topology.ancestor_of_kind(entity, kind)

    def _direct(self, entity: str, kinds: frozenset[str]) -> list[str]:
        """Returns the parents of some kinds with their ancestors, else the ancestors of these kinds."""
        near = [e for e in self.topology.parents[entity] if kind_of(e) in kinds]
        over = [*near, *(a for e in near for a in self.topology.ancestors(e))] or self.topology.ancestors(entity)
        return [e for e in over if kind_of(e) in kinds]

    def above_node(self, node: str) -> tuple[str, ...]:
        """Returns what contains or supplies a node, nearest first, by topology, labels or name; then its versions."""
        above = [e for e in self.topology.ancestors(node) if kind_of(e) in _CONTAINERS]
        have = {kind_of(e) for e in above}
        return (*above, *(e for e in self._named_above(node) if kind_of(e) not in have), *self._software.get(node, ()))

    def _named_above(self, entity: str) -> Iterable[str]:
        """Yields what labels and the name of an entity say of its place."""
        facts: Mapping[str, Any] = self.topology.attributes.get(entity, {})
        for label in _LABELS:
            if isinstance(facts.get(label), str) and facts[label]:
                yield f"{label}:{facts[label]}"
        match = _RACK_NAME.match(entity.partition(":")[2])
        if match and "rack" not in facts:
            yield f"rack:{match[1]}"

    def link_suspect(self, port: str) -> str:
        """Returns the end that represents the link, a node's port first, so that both ends give one suspect."""
        peer = self.topology.attributes.get(port, {}).get(PEER)
        if not isinstance(peer, str):
            return port
        over = self.topology.ancestor_of_kind
        return min((port, peer), key=lambda e: (over(e, "node") is None, over(e, "leaf") is None, e))

    def node_of(self, entity: str) -> str | None:
        """Returns the node of a device or rank, by topology, else by the name of the device."""
        node = self.topology.ancestor_of_kind(self._gpu_of(entity) or entity, "node")
        return guess_node_by_name(entity, self.topology) if node is None else node

    def _gpu_of(self, entity: str) -> str | None:
        """Returns the GPU of a rank, of one whose job ended the last one; None for anything else."""
        if kind_of(entity) != "rank":
            return None
        if (gpu := self.topology.ancestor_of_kind(entity, "gpu")) is None:
            return self._ran_on.get(entity)
        if len(self._ran_on) > MOST_REMEMBERED:
            self._ran_on = {rank: at for rank, at in self._ran_on.items() if rank in self.topology.parents}
        self._ran_on[entity] = gpu
        return gpu

    def works_of(self, entity: str) -> tuple[str, ...]:
        """Returns the stages and jobs of a rank, and those whose ranks run on a GPU or node."""
        if kind_of(entity) in WORK:
            above = tuple(e for e in self.topology.ancestors(entity) if kind_of(e) in WORK)
            if above or kind_of(entity) == "job":
                return above
            return (f"job:{entity.partition(':')[2].rpartition('.')[0]}",) if "." in entity else ()
        if kind_of(entity) not in ("gpu", "node"):
            return ()
        ranks = (e for e in self.topology.descendants(entity) if kind_of(e) == "rank")
        return tuple(dict.fromkeys(e for rank in ranks for e in self.topology.ancestors(rank) if kind_of(e) in WORK))

    def chain(self, base: str) -> tuple[str, ...]:
        """Returns an entity and everything above it, nearest first, without work and versions."""
        if (known := self._chains.get(base)) is None:
            above = list(self.topology.ancestors(base))
            node = self.node_of(base)
            if node is not None:
                above += (node, *(e for e in self.above_node(node) if kind_of(e) not in ("version", "change")))
            above += self._rails_of(base) if kind_of(base) == "leaf" else ()
            known = self._chains[base] = tuple(dict.fromkeys((base, *above)))
        return known

    def _rails_of(self, leaf: str) -> list[str]:
        """Returns the rails that all ports of a leaf are on: where each leaf serves one rail, a bad rail is all of its
        leaves."""
        ports = [p for p in self.topology.descendants(leaf) if kind_of(p) == "port"]
        shared = [frozenset(e for e in self.topology.parents[p] if kind_of(e) == "rail") for p in ports]
        return sorted(frozenset.intersection(*(rails for rails in shared if rails))) if any(shared) else []

    def is_placed(self, entity: str) -> bool:
        """Returns whether the topology says what an entity shares with others, or there are no others."""
        if self.number["node"] == 1 or entity in self.units:
            return True
        node = self.node_of(entity) or entity
        return any(kind_of(e) in _PLACES for e in (*self.topology.ancestors(node), *self.topology.ancestors(entity)))

    def software_of(self, entity: str) -> tuple[str, ...]:
        """Returns the versions and recent changes of the node of an entity."""
        node = self.node_of(entity)
        return tuple(f for f in self._software.get(node or "", ()) if f in self.units)

    def around(self, entity: str) -> frozenset[str]:
        """Returns the leaves and rails of the devices on the entity's node, or on all nodes of a job or its stage."""
        return self._around.get(self.node_of(entity) or entity, frozenset())

    def reaching(self, entity: str) -> frozenset[str]:
        """Returns what reaches an entity without containing it: network, work, versions; all supplies of a job."""
        near = {*self.around(entity), *self.works_of(entity), *self.software_of(entity)}
        if kind_of(entity) in ("job", "stage"):
            if (known := self._supplies.get(entity)) is None:
                supplies = {e for node in self.units.get(entity, ()) for e in self.above_node(node)}
                known = self._supplies[entity] = frozenset(e for e in supplies if kind_of(e) in _CONTAINERS)
            near |= known
        return frozenset(near)

    def unit_of(self, factor: str, entity: str) -> str | None:
        """Returns the unit of a factor that a finding is about, or the rack below it; None for the factor itself."""
        if entity == factor:
            return None
        unit = FACTOR_KINDS[kind_of(factor)].unit
        if unit == "":
            return self.suspect_of(entity)
        if unit == "port":
            port = self.topology.ancestor_of_kind(entity, "port")
            return None if port is None else self.link_suspect(port)
        node = self.node_of(entity)
        if node is None:
            return entity if kind_of(entity) == "rack" or kind_of(entity) == "rank" else None
        return node

    def suspect_of(self, entity: str) -> str:
        """Returns the suspect of a finding: the entity, a rank's GPU, a leak detector's rack, one end of a link."""
        kind = kind_of(entity)
        if kind == "port":
            return self.link_suspect(entity)
        if kind == "leak_detector":  # of a rack; one in a coolant unit names the wet place better than its rack does
            place = next((p for p in self.topology.parents.get(entity, ()) if kind_of(p) in ("rack", "cdu")), entity)
            return place if kind_of(place) == "rack" else entity
        return self._gpu_of(entity) or entity

    def as_json(self) -> list[list[Any]]:
        """Returns the recent changes, which the topology of this moment does not show."""
        return [[*key, at] for key, at in sorted(self.changed.items())]

    def load_json(self, data: Iterable[Iterable[Any]]) -> None:
        """Restores the recent changes; the versions of this moment are taken as known."""
        self._versions_seen = -1, -1
        self.changed = {(node, name, version): at for node, name, version, at in data}
