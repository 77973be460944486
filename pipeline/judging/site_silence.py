"""Detects silent sites by wall clock. Frames advance with telemetry, so that no detector can see that all of it
stopped.

A site is silent if none of its agents sent a message for MIN_SILENCE_S while the pipeline had read all input, or could
not read. This is an event, which the detector `telemetry_site` turns into a page; a second event reports the return, or
that its last agent is out of service.
Both are stored, so that a replay gives the same result. A site that never had an agent is not silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.records import SECOND, Event, iso
from pipeline.model.topology import Topology

MIN_SILENCE_S = 35.0
"""Time without a message from any agent of a site (s); it starts with the pipeline. Chosen: seven missed messages at 5
s, before the detector `telemetry` reports each node (at least 40 s), and a page within 60 s."""
MISSED_MESSAGES, MAX_SILENCE_S = 3, 600.0
"""With a longer interval: missed messages, and the upper limit (s). Chosen."""
MAX_CHECK_GAP_S = 10.0
"""Longest time between two checks that counts as silence (s): a loop that is busy for longer has not read the input.
Chosen: MIN_SILENCE_S takes at least four checks."""
MAX_NODE_AGE_US = 72 * 3600 * SECOND
"""Nodes that sent nothing for longer are no longer expected; same as in the detector `telemetry`."""
SAME_TIME_US = 60 * SECOND
"""Nodes whose last message is this close to the newest one became silent together. Chosen."""
MAX_SAMPLE_NODES = 64
"""Nodes that are compared for a common cause. Chosen: what 64 nodes share, nearly all share."""
_MIN_NODES = 1000  # below it, nodes that ingest has dropped are kept
SHARED_KINDS = ("leaf", "spine", "switch", "pdu", "rack", "row")
"""Kinds that silent nodes may have in common, the most likely first."""
SILENT, HEARD, RETIRED = "site_silent", "site_heard", "out_of_service"


@dataclass(slots=True)
class _Node:
    """Last message of a node: arrival from ingest (`mark`, UTC us), and on the watch clock (`last_seen_s`)."""

    site: str
    mark: int
    last_seen_s: float


class SiteSilenceWatch:
    """Watches when the agents of each site sent their last message.

    Clock jumps and a blocked loop do not count as silence: the watch has its own clock, which follows the monotonic one
    by at most MAX_CHECK_GAP_S per check. For one thread, except `describe_total_silence`, which any thread may call.

    nodes:    node -> time of its last message (UTC us) in the store.
    site_of:  the site of a node; None while unknown.
    silent:   site -> data of the event that reported it silent.
    interval: time between the last two telemetry messages of a node (us); 0 while unknown.
    retired:  the sites of nodes that are out of service: a silent one without another node has no source left.
    """

    def __init__(
        self,
        nodes: Mapping[str, int],
        site_of: Callable[[str], str | None],
        silent: Mapping[str, Mapping[str, object]],
        monotonic: Callable[[], float] = time.monotonic,
        interval: Callable[[str], int] = lambda node: SECOND,
        retired: Callable[[], Iterable[str | None]] = lambda: (),
    ) -> None:
        self.silent: dict[str, Mapping[str, object]] = dict(silent)
        self._site_of, self._monotonic, self._interval, self._retired = site_of, monotonic, interval, retired
        self._looked = self._started = self._floor = self._time = monotonic()
        self._nodes = {node: _Node(site_of(node) or "", mark, self._started) for node, mark in nodes.items()}
        self._left: set[str] = set()  # sites that a node sent as before it sent as another: its [site] name changed

    def record_arrivals(self, nodes: Mapping[str, int], behind: bool) -> None:
        """Records the time of each node's last message after a step of ingest.

        behind: more input is unread, so that the silence of other nodes is unknown.
        """
        now = self._advance_clock()
        if behind:
            self._floor = now
        if len(self._nodes) > 2 * max(len(nodes), _MIN_NODES):  # ingest drops senders beyond a limit
            self._nodes = {node: known for node, known in self._nodes.items() if node in nodes}
        for node, mark in nodes.items():
            known = self._nodes.get(node)
            if known is None or known.mark != mark:
                site = self._site_of(node) or (known and known.site) or ""
                if known is not None and known.site != site:
                    self._left.add(known.site)
                self._nodes[node] = _Node(site, mark, now)

    def forget(self, node: str) -> None:
        """Expects nothing of a node until its next message."""
        self._nodes.pop(node, None)

    def _advance_clock(self) -> float:
        """Advances the watch's own clock and returns it (s)."""
        before, self._looked = self._looked, self._monotonic()
        self._time += min(self._looked - before, MAX_CHECK_GAP_S)
        return self._time

    def find_changes(self, now: int, reading: str | None, shares: Callable[[Sequence[str]], str]) -> list[Event]:
        """Returns events for sites that became silent and sites that returned. now: UTC us.

        reading: why the pipeline cannot read, None if it can.  shares: returns what nodes have in common, in words.
        """
        found, time_s = [], self._advance_clock()
        for site, nodes in self._expected_nodes(now).items():
            newest = max(self._nodes[node].last_seen_s for node in nodes)
            quiet = time_s - max(newest, self._floor) >= self._silence_limit_s(nodes)
            if quiet and site not in self.silent:
                found.append(self._start_silence(site, nodes, now, reading, shares))
            elif newest > self._started and not quiet and site in self.silent:
                found.append(Event(now, f"site:{site}", HEARD, self.silent.pop(site)))
        retired = sorted(self.silent.keys() & self.list_retired()) if self.silent else []
        return [
            *found,
            *(Event(now, f"site:{site}", HEARD, {**self.silent.pop(site), RETIRED: True}) for site in retired),
        ]

    def list_retired(self) -> set[str]:
        """Returns the sites all nodes of which are out of service or send as another site; any thread may call it."""
        gone = {site for site in (*self._retired(), *self._left.copy()) if site}
        return gone - {known.site for known in self._nodes.copy().values()}

    def _silence_limit_s(self, nodes: Sequence[str]) -> float:
        """Returns the time without a message (s) that counts as silence, by the node with the shortest interval.

        After only one message per node the interval is unknown: MAX_SILENCE_S applies.
        """
        interval_s = min((s for node in nodes if (s := self._interval(node) / SECOND) > 0), default=MAX_SILENCE_S)
        return max(MIN_SILENCE_S, min(MISSED_MESSAGES * interval_s, MAX_SILENCE_S))

    def undo_changes(self, events: Sequence[Event]) -> None:
        """Undoes `find_changes` after a failed write, so that the next call finds the changes again."""
        for event in events:
            site = event.entity.partition(":")[2]
            if event.kind == SILENT:
                self.silent.pop(site, None)
            else:
                self.silent[site] = event.data

    def _expected_nodes(self, now: int) -> dict[str, list[str]]:
        """Returns site -> nodes with a message within MAX_NODE_AGE_US."""
        found: dict[str, list[str]] = {}
        for node, known in self._nodes.copy().items():  # another thread may be adding to it; copy() is atomic
            if known.site and now - known.mark < MAX_NODE_AGE_US:
                found.setdefault(known.site, []).append(node)
        return found

    def describe_total_silence(self, now: int) -> str | None:
        """Returns since when no agent of any site has sent data, in words; None if one has, or none is known."""
        sites = self._expected_nodes(now)
        silent = dict(self.silent)
        if not sites or any(site not in silent for site in sites):
            return None
        since = max(str(silent[site]["since"]) for site in sites)
        return f"no data from any agent of {len(sites)} site{'' if len(sites) == 1 else 's'} since {since[:19]}Z"

    def _start_silence(
        self, site: str, expected: list[str], now: int, reading: str | None, shares: Callable[[Sequence[str]], str]
    ) -> Event:
        since = min(now, max(self._nodes[node].mark for node in expected))
        nodes = sorted(node for node in expected if self._nodes[node].mark >= since - SAME_TIME_US)
        data: dict[str, object] = {"agents": len(nodes), "since": iso(since), "nodes": nodes[:MAX_SAMPLE_NODES]}
        data |= {"reading": reading or "", "shares": "" if reading else shares(nodes)}
        self.silent[site] = data
        return Event(now, f"site:{site}", SILENT, data)


def describe_shared(nodes: Sequence[str], topology: Topology, upgraded: Callable[[Sequence[str]], str]) -> str:
    """Returns what nodes have in common, in words: entities above all of them, or an upgrade of their agents."""
    sample = nodes[:MAX_SAMPLE_NODES]
    every = [_ancestors_of_node(f"node:{node}", topology) for node in sample]
    common = set.intersection(*every) if every else set()
    found = [entity for kind in SHARED_KINDS for entity in sorted(common) if entity.startswith(f"{kind}:")]
    if version := upgraded(sample):
        found.insert(0, f"agents upgraded to {version}")
    return ", ".join(found) or "nothing known"


def _ancestors_of_node(node: str, topology: Topology) -> set[str]:
    """Returns everything above a node and its devices."""
    own: Iterable[str] = (node, *topology.descendants(node))
    return {entity for device in own for entity in topology.ancestors(device)}
