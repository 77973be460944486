"""Work on nodes in turn, such as a rolling upgrade of agents: they fall silent one after another and come back well."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detectors.base.state import State, notes
from detectors.telemetry.silence import MISSED, SITE, TOGETHER
from detectors.telemetry.silent_nodes import GAP_AGAIN, Context, Silence
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import SECOND

IN_TURN = 3
"""Silences one after another, all but the newest ended well, that are work; chosen: two may be a coincidence."""
NEXT = 1800 * SECOND
"""us after the return of a node in which the next one falls silent; chosen: a step of a roll-out waits for its node to
be ready, and for a check by the person who does it."""
LONGER = 2.0
"""Times the longest silence of the work before that the next may last; chosen: nodes of one product boot alike."""
OUTAGES = 1e-3 / (24 * 3600 * SECOND)
"""Outages of agents per node and us without any work: 1 in 1,000 node-days (assumed, as in the fault model)."""
_SURE = 4.0  # standard deviations beyond the number of such outages to be expected; chosen
_WORK = frozenset({"agent", "network", "unknown"})
"""Causes of silences that work may have: no job stopped, no fatal error, power is on."""
_LISTED = 64  # nodes in the evidence


@dataclass
class RollingWork(State):
    """Silences of nodes, and groups of nodes, that ended well, as long as each began soon after one before it.

    Rolling work is one finding, and makes suspects of tickets about the nodes that it has just reached. Pages stay what
    they are: a node that dies under its job pages also while others are upgraded.
    """

    _open: dict[str, dict[str, Any]] = notes()  # key of a silence -> since (us), nodes, well, ticket
    _ended: list[dict[str, Any]] = notes(list)  # since, back (us), nodes, ticket; of one moment once
    _folded: bool = notes(bool)  # it has made a suspect of a ticket

    def fold(self, found: Sequence[Silence], context: Context) -> Iterator[Silence]:
        """Yields the silences of an instant, those of rolling work as suspects, and the work itself."""
        silences = {s.key: s for s in found if s.key.endswith(("|node", "|nodes"))}
        self._close({*silences}, context)
        for key, silence in silences.items():
            known = self._open.setdefault(key, {"since": silence.since, "nodes": [], "well": True, "ticket": False})
            known["nodes"] = list(silence.evidence.get("nodes") or [silence.evidence.get("node", silence.entity)])
            known["well"] &= silence.level != "page" and silence.cause in _WORK
            known["ticket"] |= silence.level == "ticket"
        last = max((e["back"] for e in self._ended), default=0)
        now = [k for k in self._open.values() if k["well"] and last and k["since"] <= last + NEXT and self._is_next(k)]
        if not now and context.time - last > NEXT:
            self._ended, self._folded = [], False
        if not self._is_work(now, context):
            yield from found
            return
        longest = LONGER * max(e["back"] - e["since"] for e in self._ended)
        for silence in found:
            yield self._lower(silence, longest, context)
        told = self._folded and sum(e["ticket"] for e in (*self._ended, *now)) > 1
        if told and f"{SITE}|nodes" not in silences:
            yield self._describe(now, context)

    def _close(self, left: Collection[str], context: Context) -> None:
        """Keeps the silences that ended well, with nodes that report again; those of one moment are one."""
        over = [self._open.pop(key) for key in [k for k in self._open if k not in left]]
        if not any(known["well"] for known in over):
            return
        nodes = context.last.of_class("node")
        back = {n for n, missed in zip(nodes.names, nodes.missed.tolist(), strict=False) if missed < MISSED}
        for known in (k for k in over if k["well"]):
            returned = [n for n in known["nodes"] if n in back and not context.in_maintenance(n)]
            if not returned:
                continue
            ended = {"since": known["since"], "back": context.time, "nodes": returned, "ticket": known["ticket"]}
            same = [e for e in self._ended if abs(e["since"] - known["since"]) <= TOGETHER]
            for other in same:
                self._ended.remove(other)
                ended["nodes"] = sorted({*ended["nodes"], *other["nodes"]})
                ended["ticket"] |= other["ticket"]
            for other in self._ended:  # a node that falls silent again and again is no work on several
                other["nodes"] = [n for n in other["nodes"] if n not in ended["nodes"]]
            self._ended = [*(e for e in self._ended if e["nodes"]), ended]

    def _is_next(self, known: dict[str, Any]) -> bool:
        """Returns whether a silence is of nodes that the work has not reached before."""
        return not {*known["nodes"]} <= {n for e in self._ended for n in e["nodes"]}

    def _is_work(self, now: Sequence[dict[str, Any]], context: Context) -> bool:
        """Returns whether so many silences in turn are no coincidence at this number of nodes."""
        if len(self._ended) < IN_TURN - 1:
            return False
        first: int = min(e["since"] for e in self._ended)
        expected = OUTAGES * len(context.last.names("node")) * max(context.time - first, 0)
        starts = {k["since"] // TOGETHER for k in now}
        least = max(IN_TURN, math.ceil(expected + _SURE * math.sqrt(expected)))
        return len(self._ended) + len(starts) >= least

    def _lower(self, silence: Silence, longest: float, context: Context) -> Silence:
        """Returns a ticket as a suspect if the work explains it."""
        if silence.level != "ticket":
            return silence
        if silence.key.endswith("|hole"):
            agent, times = silence.evidence.get("agent"), silence.evidence.get("times", 0)
            explained = agent != "same" and times < GAP_AGAIN and silence.since >= min(e["since"] for e in self._ended)
        else:
            known = self._open.get(silence.key)
            soon = context.time - silence.since <= longest
            explained = known is not None and known["well"] and soon and self._is_next(known)
        self._folded |= explained
        return replace(silence, level="suspect") if explained else silence

    def _describe(self, now: Sequence[dict[str, Any]], context: Context) -> Silence:
        nodes = sorted({n for e in (*self._ended, *now) for n in e["nodes"]})
        first, longest = min(e["since"] for e in self._ended), max(e["back"] - e["since"] for e in self._ended)
        summary = pager_title(
            SITE,
            f"{len(nodes)} nodes silent in turn, each back within {short_duration(longest / SECOND)}: rolling work",
        )
        clears = f"clears when no node falls silent for {NEXT // (60 * SECOND)} min after the last return"
        evidence = {"nodes": nodes[:_LISTED], "rolling_work": len(nodes)}
        return Silence(
            "work|rolling", SITE, first, "ticket", float(len(nodes)), summary, "work", clears, ("node.load1",), evidence
        )
