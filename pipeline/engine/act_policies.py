"""Policies propose acts by themselves: one act for each new incident that matches detector, confidence and scope.

They never approve here: an act of a policy waits for a person like every other, unless the site switched its verb on
for one scope (`pipeline.acts.breaker.find_approving_policy`). An incident that is old when it is seen gets no act, so
that nothing of the past is done after a restart or when the breaker is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipeline.acts import ledger
from pipeline.acts.act import MAX_REASON, MAX_TARGETS, POLICY, Act
from pipeline.acts.board import Board
from pipeline.config.acts import ActPolicy
from pipeline.engine.act_facts import SINGLE
from pipeline.engine.engine import Engine
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import SECOND, Caller, Incident
from pipeline.model.topology import Topology, kind_of

log = logging.getLogger("fleetpulse.acts")
EVERY = 5 * SECOND
"""Time between two looks at the incidents (us). Chosen: as the executor's poll."""
FRESH = 900 * SECOND
"""Age of an incident beyond which no policy proposes anything (us). Chosen: as an approval holds."""
HOUR = 3600 * SECOND


class PolicyProposer:
    """Proposes the acts of [[acts.policies]]. `run` is called by the loop of the pipeline."""

    def __init__(self, board: Board, read_engine: Callable[[], Engine | None]) -> None:
        self._board, self._read_engine = board, read_engine
        self._last = 0
        self._done: dict[tuple[str, str], int] = {}

    def run(self) -> list[Act]:
        """Returns the acts proposed now; empty between two looks, without policies, and while the breaker is open."""
        engine, policies, now = self._read_engine(), self._board.config.policies, self._board.clock()
        if engine is None or not policies or 0 <= now - self._last < EVERY:
            return []
        self._last = now
        self._done = {key: seen for key, seen in self._done.items() if now - seen < 2 * FRESH}
        with engine.lock:
            fresh = [i for i in engine.life.shown.values() if is_due(i, now)]
            burn_in, drifted = read_burn_ins(self._board, now), frozenset(engine.finding_filter.budget.lowered)
            wanted = [
                (policy, incident, targets)
                for incident in sorted(fresh, key=lambda i: (i.opened, i.id))
                for policy in policies
                if (policy.name, incident.id) not in self._done
                and (targets := find_targets(policy, incident, engine.topology, burn_in))
            ]
        return [made for each in wanted if (made := self._propose(*each, drifted, now)) is not None]

    def _propose(
        self, policy: ActPolicy, incident: Incident, targets: tuple[str, ...], drifted: frozenset[str], now: int
    ) -> Act | None:
        """Proposes the act of a policy for an incident. drifted: detectors that drifted, or never fitted this site."""
        board, name = self._board, f"{POLICY}{policy.name}"
        if board.config.mode_of(policy.verb) == "off":
            return None
        if incident.detector in drifted:
            board.open_breaker(f"policy {policy.name} follows {incident.detector}, whose pages were too often wrong")
        if board.read_breaker():
            return None
        key = f"{name}:{incident.id}"
        known = board.read(ledger.find_by_key, key) is not None
        if not known and board.read(ledger.count_proposed, name, now - HOUR) >= policy.per_hour:
            return None
        reason = f"{incident.summary} (confidence {incident.confidence:.2f})"[:MAX_REASON]
        try:
            made = board.propose(policy.verb, targets, Caller(name, "operator", "policy"), reason, incident.id, key=key)
        except FleetpulseError as error:
            log.warning("policy %s, incident %s: %s", policy.name, incident.id, error)
            return None
        self._done[policy.name, incident.id] = now
        board.review()
        return made if made.created == now else None


def is_due(incident: Incident, now: int) -> bool:
    """Returns whether an incident may get an act of a policy: open, new, real, neither silenced nor acknowledged."""
    new = 0 <= now - incident.opened < FRESH
    return new and incident.state == "open" and not incident.simulated and not incident.is_held_back


def read_burn_ins(board: Board, now: int) -> frozenset[str]:
    """Returns the nodes (`node:NAME`) that were released within [acts] burn_in_days."""
    return frozenset(board.read(ledger.list_released, now - round(board.config.burn_in_days * 24 * HOUR)))


def find_targets(
    policy: ActPolicy, incident: Incident, topology: Topology, burn_in: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Returns the nodes for which a policy proposes an act; empty if it does not match.

    The confidence must be known, and all nodes in its scope. Of a cause that is a group, such as a rack, the act
    names all nodes, as the guards demand; a cause with more than MAX_TARGETS nodes, or on no node, gets none. burn_in:
    nodes for which burn_in_confidence is enough.
    """
    if policy.detector not in ("*", incident.detector) or incident.confidence is None:
        return ()
    if kind_of(incident.cause) in SINGLE:
        above = topology.ancestor_of_kind(incident.cause, "node")
        nodes = {incident.cause} if kind_of(incident.cause) == "node" else {above} - {None}
    else:
        nodes = {e for e in topology.descendants(incident.cause) if kind_of(e) == "node"}
    fresh = bool(nodes) and all(node in burn_in for node in nodes)
    least = min(policy.min_confidence, policy.burn_in_confidence) if fresh else policy.min_confidence
    if incident.confidence < least:
        return ()
    inside = all(policy.scope in ("*", node, *topology.ancestors(str(node))) for node in nodes)
    return tuple(sorted(map(str, nodes))) if inside and len(nodes) <= MAX_TARGETS else ()
