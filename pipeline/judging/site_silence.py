"""Sites of which nothing is heard, by wall clock: frames advance with telemetry, so that no detector sees its absence.

A site is silent when none of its agents was heard for PATIENCE while the pipeline had read all that there was, or could
read nothing. That is an event, which `telemetry_site` turns into a page; another one says that it is heard again. Both
are stored, so that a replay of the stored events finds the same. A site that never had an agent is quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.records import SECOND, Event, iso
from pipeline.model.topology import Topology

PATIENCE_S = 35.0
"""Seconds without a message of any agent of a site. Chosen: agents send every 5 s, so that seven in a row are missing,
it is told before the detector `telemetry` tells of the nodes one by one (node_seconds, by frames: 40 s at least),
and a page arrives within 60 s. A restart of the pipeline is no silence: the time begins with it."""
LOOKS, SLOWEST_S = 3, 600.0
"""Where the agents send more seldom, so many of their messages must be missing, up to so many seconds. Chosen."""
LOOK_S = 10.0
"""Longest time between two looks that counts as silence: while the loop judges for longer, it reads nothing, and knows
of nobody whether he is silent. Chosen: three and a half such looks are PATIENCE_S."""
GIVEN_UP = 72 * 3600 * SECOND
"""Nodes not heard for longer are not expected any more; as the detector `telemetry` has it."""
TOGETHER = 60 * SECOND
"""Nodes last heard so shortly before the newest one fell silent with it; others were silent before. Chosen."""
SAMPLE = 64
"""Nodes that are looked at for what they share. Chosen: what 64 of them share, nearly all do."""
_FEW = 1000  # nodes that are worth no tidying
SHARED_KINDS = ("leaf", "spine", "switch", "pdu", "rack", "row")
"""What the silent nodes may have in common, the most likely first."""
SILENT, HEARD = "site_silent", "site_heard"


@dataclass(slots=True)
class _Node:
    """When a node was heard last: what ingest said of it then (UTC us), and by the watch's own clock (s)."""

    site: str
    mark: int
    heard: float


class SilenceWatch:
    """Looks at when the agents of each site were heard. No clock that jumps makes anybody silent, nor does a loop that
    does not read: the watch's own clock runs by the monotonic one, at most LOOK_S from one look to the next.

    For one thread, but for `all_silent`, which any thread may ask.

    nodes:    node -> when it was heard last (UTC us), as the store has it.
    site_of:  the site of a node; None while it is not known.
    silent:   site -> data of the event that said that it is silent.
    interval: how far the last messages of a node's telemetry lay apart (us); 0 while that is not known.
    """

    def __init__(
        self,
        nodes: Mapping[str, int],
        site_of: Callable[[str], str | None],
        silent: Mapping[str, Mapping[str, object]],
        monotonic: Callable[[], float] = time.monotonic,
        interval: Callable[[str], int] = lambda node: SECOND,
    ) -> None:
        self.silent: dict[str, Mapping[str, object]] = dict(silent)
        self._site_of, self._monotonic, self._interval = site_of, monotonic, interval
        self._looked = self._started = self._floor = self._time = monotonic()
        self._nodes = {node: _Node(site_of(node) or "", mark, self._started) for node, mark in nodes.items()}

    def hear(self, nodes: Mapping[str, int], behind: bool) -> None:
        """Takes when each node was heard last, after a step of ingest.

        behind: something was read and more lies unread: how long others have been silent is not known.
        """
        now = self._now()
        if behind:
            self._floor = now
        if len(self._nodes) > 2 * max(len(nodes), _FEW):  # ingest forgets senders beyond a number (senders.py)
            self._nodes = {node: known for node, known in self._nodes.items() if node in nodes}
        for node, mark in nodes.items():
            known = self._nodes.get(node)
            if known is None or known.mark != mark:
                self._nodes[node] = _Node((known and known.site) or self._site_of(node) or "", mark, now)

    def _now(self) -> float:
        """The watch's own clock (s)."""
        before, self._looked = self._looked, self._monotonic()
        self._time += min(self._looked - before, LOOK_S)
        return self._time

    def look(self, now: int, reading: str | None, shares: Callable[[Sequence[str]], str]) -> list[Event]:
        """What changed: sites that are silent now, and sites that are heard again. now: UTC us.

        reading: why the pipeline cannot read, None if it can.  shares: what nodes have in common, in words.
        """
        found, time_s = [], self._now()
        for site, nodes in self._expected(now).items():
            newest = max(self._nodes[node].heard for node in nodes)
            quiet = time_s - max(newest, self._floor) >= self._patience(nodes)
            if quiet and site not in self.silent:
                found.append(self._fell_silent(site, nodes, now, reading, shares))
            elif newest > self._started and not quiet and site in self.silent:
                found.append(Event(now, f"site:{site}", HEARD, self.silent.pop(site)))
        return found

    def _patience(self, nodes: Sequence[str]) -> float:
        """Seconds without a message of any of the nodes that are a silence: by the one that sends most often.

        Where each of them has sent telemetry once, nobody knows how often they send.
        """
        apart = min((s for node in nodes if (s := self._interval(node) / SECOND) > 0), default=SLOWEST_S)
        return max(PATIENCE_S, min(LOOKS * apart, SLOWEST_S))

    def forget(self, events: Sequence[Event]) -> None:
        """What `look` found could not be written: the next look finds it again."""
        for event in events:
            site = event.entity.partition(":")[2]
            if event.kind == SILENT:
                self.silent.pop(site, None)
            else:
                self.silent[site] = event.data

    def _expected(self, now: int) -> dict[str, list[str]]:
        """Site -> nodes that were heard within GIVEN_UP."""
        found: dict[str, list[str]] = {}
        for node, known in self._nodes.copy().items():  # another thread may be adding to it; copy() is atomic
            if known.site and now - known.mark < GIVEN_UP:
                found.setdefault(known.site, []).append(node)
        return found

    def all_silent(self, now: int) -> str | None:
        """Since when no agent at all has been heard, in words; None if one was, or there never was one."""
        sites = self._expected(now)
        silent = dict(self.silent)
        if not sites or any(site not in silent for site in sites):
            return None
        since = max(str(silent[site]["since"]) for site in sites)
        return f"no agent of {len(sites)} site{'' if len(sites) == 1 else 's'} heard since {since[:19]}Z"

    def _fell_silent(
        self, site: str, expected: list[str], now: int, reading: str | None, shares: Callable[[Sequence[str]], str]
    ) -> Event:
        since = min(now, max(self._nodes[node].mark for node in expected))
        nodes = sorted(node for node in expected if self._nodes[node].mark >= since - TOGETHER)
        data: dict[str, object] = {"agents": len(nodes), "since": iso(since), "nodes": nodes[:SAMPLE]}
        data |= {"reading": reading or "", "shares": "" if reading else shares(nodes)}
        self.silent[site] = data
        return Event(now, f"site:{site}", SILENT, data)


def shared_by(nodes: Sequence[str], topology: Topology, upgraded: Callable[[Sequence[str]], str]) -> str:
    """What nodes have in common, in words: a device that all of them hang on, or an upgrade of their agents."""
    sample = nodes[:SAMPLE]
    every = [_above(f"node:{node}", topology) for node in sample]
    common = set.intersection(*every) if every else set()
    found = [entity for kind in SHARED_KINDS for entity in sorted(common) if entity.startswith(f"{kind}:")]
    if version := upgraded(sample):
        found.insert(0, f"agents upgraded to {version}")
    return ", ".join(found) or "nothing known"


def _above(node: str, topology: Topology) -> set[str]:
    """Everything that a node, or a device of it, hangs on."""
    own: Iterable[str] = (node, *topology.descendants(node))
    return {entity for device in own for entity in topology.ancestors(device)}
