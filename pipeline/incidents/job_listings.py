"""Of which nodes it is known which jobs run on them: those with an inventory by an agent that reads jobs.

Without one, as in a new store that reads a backlog, a node without ranks is not idle: nothing is known about its jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import duckdb

from pipeline.model.records import SECOND, Event
from pipeline.model.topology import kind_of

EARLIER = 60 * SECOND
"""Time before its first inventory from which on the jobs of a node count as known (us). Chosen: an agent sends its
first readings before, and frames and inventory need not be of the same moment."""
_READ = """
SELECT node, bool_or(kind = 'rank' OR entity = 'collector:' || node || '.jobs' OR simulated),
       coalesce(epoch_us(min(since)), 0)
FROM entity WHERE node IS NOT NULL GROUP BY node
"""


class JobListings:
    """Nodes whose jobs are known, and since when. An inventory counts once its ranks are read (`settle`).

    Only an inventory with a rank or with the collector `jobs` lists jobs; those that are made for metrics from other
    programs do not. A simulated node has no collectors, and lists its jobs in each inventory.
    """

    def __init__(self, is_simulated: Callable[[str], bool]) -> None:
        self._is_simulated = is_simulated
        self._listed: dict[str, int] = {}  # node -> time of its first inventory with jobs (us)
        self._reported: dict[str, int] = {}  # the same of inventories that may be of an agent without the collector
        self._waiting: list[tuple[dict[str, int], str, int]] = []  # inventories whose ranks are not read yet

    @property
    def is_waiting(self) -> bool:
        """Whether there are inventories whose ranks are not read yet."""
        return bool(self._waiting)

    def note(self, inventories: Iterable[Event]) -> None:
        """Adds inventories as they arrive; of a node only the earliest counts."""
        for event in inventories:
            known = event.data.get("entities")
            entities = known if isinstance(known, dict) else {}
            collector = f"collector:{event.entity.partition(':')[2]}.jobs"
            lists = collector in entities or any(kind_of(entity) == "rank" for entity in entities)
            found = self._listed if lists else self._reported
            if event.time < found.get(event.entity, event.time + 1):
                self._waiting.append((found, event.entity, event.time))

    def settle(self, nodes: Iterable[str], time: int) -> None:
        """The ranks of the inventories so far are read. nodes: those of all ranks, `node:NAME`; time: now (us)."""
        for found, node, at in self._waiting:
            found[node] = min(at, found.get(node, at))
        self._waiting.clear()
        for node in nodes:
            self._listed.setdefault(node, time)

    def load(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Reads from the store of which nodes there were inventories before a restart."""
        for node, lists, since in connection.execute(_READ).fetchall():
            (self._listed if lists else self._reported)[f"node:{node}"] = since

    def count_unlisted(self, nodes: Iterable[str], time: int) -> int:
        """Returns of how many of some nodes without ranks the jobs are not known at a time (us)."""
        return sum(not self._is_listed(node, time + EARLIER) for node in nodes)

    def _is_listed(self, node: str, until: int) -> bool:
        def is_before(found: Mapping[str, int]) -> bool:
            return node in found and found[node] <= until

        return is_before(self._listed) or (is_before(self._reported) and self._is_simulated(node))
