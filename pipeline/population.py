"""How many entities each sender names, and how many there are of each kind: bounded before any of them gets an id.

An entity counts for the sender that named it first, until nobody has named it for FORGET.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from pipeline.config.sections import Limits
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASS_OF_KIND
from pipeline.model.topology import kind_of

FORGET = 24 * 3600 * SECOND
"""An entity that nobody named for one to two of these counts no more (chosen: inventory comes every hour)."""
PER_GPU: Mapping[str, int] = {
    **dict.fromkeys(CLASS_OF_KIND, 1),
    **dict.fromkeys(("job", "stage", "rack", "leaf"), 1),
    "nvlink": 18,
    "sensor": 16,
    "service": 16,
    "rank": 8,
    "neuroncore": 8,
    "port": 8,
    "dimm": 4,
    "disk": 4,
    "filesystem": 4,
    "collector": 4,
}
"""Kind -> entities of it per GPU that a site may have, unless configured. Eighteen NVLinks as in NVIDIA's H100; the
others chosen: at least twice what a node of 8 GPUs with 64 sensors and 60 services has. Other kinds share OTHER."""
OTHER = "other"  # kinds that are not in PER_GPU count together, one per GPU
Known = tuple[str, str, str]
"""Site, entity, and the sender that named it."""


class Population:
    """Counts entities. For one thread. Memory: one entry for each entity that counts."""

    def __init__(self, limits: Limits, known: Iterable[Known] = ()) -> None:
        self._limits = limits
        self._recent: dict[str, dict[str, str]] = {}  # site -> entity -> sender
        self._older: dict[str, dict[str, str]] = {}
        self._of_sender: Counter[str] = Counter()
        self._of_kind: Counter[str] = Counter()
        for site, entity, sender in known:
            if not self._is_known(site, entity):
                self._add(site, entity, sender)

    def __len__(self) -> int:
        return sum(self._of_kind.values())

    def name(self, site: str, sender: str, entities: Collection[str]) -> dict[str, str]:
        """Counts `entities`, which `sender` names; entity -> why for those that it may not add."""
        new = [entity for entity in entities if not self._is_known(site, entity)]
        refused: dict[str, str] = {}
        full: dict[str, str] = {}  # pool -> why: one text for all that it holds for
        for entity in new:
            fault = full.get("") or full.get(pool := _pool(entity))
            if fault is None and (fault := self._sender_fault(sender, 1)):
                full[""] = fault
            elif fault is None and (fault := self._kind_fault(pool, 1)):
                full[pool] = fault
            if fault is None:
                self._add(site, entity, sender)
            else:
                refused[entity] = fault
        return refused

    def name_all(self, site: str, sender: str, entities: Collection[str]) -> str | None:
        """As `name`, but counts all or nothing; why nothing."""
        new = dict.fromkeys(entity for entity in entities if not self._is_known(site, entity))
        kinds = Counter(map(_pool, new))
        fault = self._sender_fault(sender, len(new)) if new else None
        for kind, number in kinds.items():
            fault = fault or self._kind_fault(kind, number)
        if fault is None:
            for entity in new:
                self._add(site, entity, sender)
        return fault

    def most(self, sender: str) -> int:
        """How many entities a sender may name."""
        return self._limits.senders.get(sender, self._limits.entities_per_sender)

    def turn(self) -> Iterator[str]:
        """Another FORGET has passed: the entities that count no more."""
        gone, self._older, self._recent = self._older, self._recent, {}
        for named in gone.values():
            for entity, sender in named.items():
                self._of_sender[sender] -= 1
                self._of_kind[_pool(entity)] -= 1
                yield entity
        self._of_sender, self._of_kind = +self._of_sender, +self._of_kind

    def _is_known(self, site: str, entity: str) -> bool:
        """Whether it counts already; it goes on to."""
        if entity in self._recent.get(site, ()):
            return True
        older = self._older.get(site, {})
        if entity not in older:
            return False
        self._recent.setdefault(site, {})[entity] = older.pop(entity)
        return True

    def _add(self, site: str, entity: str, sender: str) -> None:
        self._recent.setdefault(site, {})[entity] = sender
        self._of_sender[sender] += 1
        self._of_kind[_pool(entity)] += 1

    def _sender_fault(self, sender: str, more: int) -> str | None:
        most = self.most(sender)
        if self._of_sender[sender] + more <= most:
            return None
        return (
            f"{more} new entities beside the {self._of_sender[sender]} of sender {sender}, at most {most}: "
            f"see [limits] entities_per_sender and senders"
        )

    def _kind_fault(self, kind: str, more: int) -> str | None:
        most = self._limits.kinds.get(kind, PER_GPU.get(kind, 1) * self._limits.gpus)
        if self._of_kind[kind] + more <= most:
            return None
        return f"{more} new entities beside the {self._of_kind[kind]} of kind {kind}, at most {most}: see [limits] gpus"


def _pool(entity: str) -> str:
    kind = kind_of(entity)
    return kind if kind in PER_GPU else OTHER
