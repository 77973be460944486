"""The circuit breaker, and what policies may do by themselves. Once open, only people act; only a person closes it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import duckdb

from pipeline.acts import ledger
from pipeline.acts.act import POLICY, VERB_KINDS, Act, State
from pipeline.config.acts import ActPolicy
from pipeline.model.records import SECOND

MAX_FAILED = 3
"""Failed acts within an hour that open the breaker. Chosen."""
FAILED: tuple[State, ...] = ("failed", "rolled_back")
"""States of an act that did not get its effect; a rolled back one failed on one of its nodes."""
HOUR = 3600 * SECOND
UNDONE_WINDOW = 24 * HOUR
"""How long no policy approves a hold of a node that a person gave back at the scheduler (us): it would be taken from
them again. Chosen: a day, in which a person looks at it."""
MAX_PROPOSED_SHARE = 0.05
"""Share of the fleet that policies may propose within 5 minutes: beyond it, the detectors are wrong, or the fault is of
the site. Chosen: as the limit of nodes out of service."""
PROPOSED_WINDOW = 300 * SECOND


def find_reason(cursor: duckdb.DuckDBPyConnection, now: int, fleet_nodes: int) -> str:
    """Returns why automation must stop now; "" if it may go on. fleet_nodes: size of the fleet, 0 if unknown."""
    closed = ledger.read_breaker_closed(cursor)
    failed = ledger.count_steps(cursor, FAILED, max(now - HOUR, closed))
    if failed >= MAX_FAILED:
        return f"{failed} acts failed within an hour"
    proposed = ledger.count_targets(cursor, max(now - PROPOSED_WINDOW, closed), POLICY)
    limit = max(1, math.floor(MAX_PROPOSED_SHARE * fleet_nodes))
    if fleet_nodes and proposed > limit:
        return f"policies proposed {proposed} nodes within 5 minutes; at most {limit} of {fleet_nodes}"
    return ""


def find_approving_policy(
    cursor: duckdb.DuckDBPyConnection, act: Act, policies: Iterable[ActPolicy], now: int
) -> str | None:
    """Returns the name of the policy that may approve this act by itself; None: a person must.

    A policy approves only for a scope: one for everywhere (`*`) proposes at most. A person with the name of a policy
    is none.
    """
    if (
        act.by_person
        or not act.requested_by.startswith(POLICY)
        or act.plan is None
        or act.plan.failing
        or act.plan.people > 1
    ):
        return None
    name = act.requested_by.removeprefix(POLICY)
    policy = next((p for p in policies if p.name == name), None)
    if (
        policy is None
        or not policy.approve
        or policy.scope == "*"
        or VERB_KINDS[act.verb].hard
        or policy.verb != act.verb
    ):
        return None
    if ledger.read_breaker(cursor) or ledger.was_undone(cursor, act.targets, now - UNDONE_WINDOW):
        return None
    used = ledger.count_steps(cursor, ["approved"], now - HOUR, act.requested_by, act.mode)
    return name if used < policy.per_hour else None
