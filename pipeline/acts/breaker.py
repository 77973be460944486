"""The circuit breaker, and what policies may do by themselves. Once open, only people act; only a person closes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.acts import ledger
from pipeline.acts.act import VERB_KINDS, Act
from pipeline.model.records import SECOND

if TYPE_CHECKING:
    from pipeline.acts.board import Board

MAX_FAILED = 3
"""Failed acts within an hour that open the breaker. Chosen."""
HOUR = 3600 * SECOND
MAX_PROPOSED_SHARE = 0.05
"""Share of the fleet that policies may propose within 5 minutes: beyond it, the detectors are wrong, or the fault is of
the site. Chosen: as the limit of nodes out of service."""
PROPOSED_WINDOW = 300 * SECOND
POLICY = "policy:"


def find_reason(board: Board, fleet_nodes: int | None = None) -> str:
    """Returns why automation must stop now; "" if it may go on. fleet_nodes: size of the fleet, where known."""
    now, closed = board.clock(), board.read(ledger.read_breaker_closed)
    failed = board.read(ledger.count_steps, ["failed"], max(now - HOUR, closed))
    if failed >= MAX_FAILED:
        return f"{failed} acts failed within an hour"
    proposed = board.read(ledger.count_targets, max(now - PROPOSED_WINDOW, closed), POLICY)
    size = fleet_nodes if fleet_nodes is not None else board.fleet_nodes()
    limit = max(1, math.floor(MAX_PROPOSED_SHARE * size))
    if size and proposed > limit:
        return f"policies proposed {proposed} nodes within 5 minutes; at most {limit} of {size}"
    return ""


def find_approving_policy(board: Board, act: Act) -> str | None:
    """Returns the name of the policy that may approve this act by itself; None: a person must."""
    if not act.requested_by.startswith(POLICY) or act.plan is None or act.plan.failing or act.plan.people > 1:
        return None
    name = act.requested_by.removeprefix(POLICY)
    policy = next((p for p in board.config.policies if p.name == name), None)
    if policy is None or not policy.approve or VERB_KINDS[act.verb].hard or policy.verb != act.verb:
        return None
    if board.read_breaker():
        return None
    used = board.read(ledger.count_steps, ["approved"], board.clock() - HOUR, act.requested_by, act.mode)
    return name if used < policy.per_hour else None
