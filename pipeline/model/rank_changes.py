"""Which ranks a change of the topology concerns, so that state is renewed for those ranks alone.

Jobs start and end every few seconds at a site of a thousand nodes; all ranks are tens of thousands.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

from pipeline.model.topology import WORK, Topology, kind_of

_newest: WeakKeyDictionary[Topology, tuple[tuple[int, int], tuple[str, ...] | None]] = WeakKeyDictionary()


class RankChanges:
    """What one reader has seen of a topology. A pickle or copy of it has seen nothing."""

    def __init__(self) -> None:
        self._seen: tuple[ReferenceType[Topology], int, int] | None = None

    def __reduce__(self) -> tuple[type[RankChanges], tuple[()]]:
        return RankChanges, ()

    def read(self, topology: Topology) -> tuple[str, ...] | None:
        """Returns the ranks, stages and jobs that were added, removed or moved since the last call, and the ranks below
        them; None where anything may have changed: at first, with another topology, and after a change of devices."""
        before, self._seen = self._seen, (ref(topology), topology.version, topology.device_version)
        if before is None or before[0]() is not topology or before[2] != topology.device_version:
            return None
        return _find_changed(topology, before[1])

    def forget(self) -> None:
        """Lets the next call return None."""
        self._seen = None


def _find_changed(topology: Topology, since: int) -> tuple[str, ...] | None:
    """Returns the work that changed after a version; readers that have seen the same share it."""
    span = since, topology.version
    known = _newest.get(topology)
    if known is None or known[0] != span:
        changed = topology.changed_since(since)
        if changed is not None:
            works = [e for e in changed if kind_of(e) in WORK and kind_of(e) != "rank"]
            below = (e for e in topology.descendants(*works) if kind_of(e) == "rank")
            changed = tuple(dict.fromkeys((*changed, *below)))
        known = _newest[topology] = span, changed
    return known[1]
