"""What operators do to a system that runs: `up` again, stop it, take it down and bring it back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outage import TWICE, whole
from stack import SERVICES, CheckError, Stack

UP_S = 300
"""Chosen: the first `up` takes one to two minutes, with the history."""
GOOD_ENDS = {"kafka": (0, 143)}
"""143 is what Java returns after an orderly end on SIGTERM; ours return 0. 137 is a kill after the grace period."""
GROWTH = 1.1
"""Most rows after, against before. Chosen: a second history would double them, some minutes add a hundredth."""


def second_life(stack: Stack, report: Callable[[str, Callable[[], str]], bool]) -> None:
    report("`up --wait` again changes nothing", lambda: up_again(stack))
    report("everything ends when asked, within its grace period", lambda: stopped(stack))
    report("`down`, then `up --wait`: it goes on where it stood", lambda: kept(stack))


def up_again(stack: Stack) -> str:
    """init has run to its end and is run again: it must not trip over a pipeline at work."""
    before = stack.container("pipeline")
    stack.up(UP_S)
    if stack.container("pipeline") != before:
        raise CheckError("the pipeline's container was recreated")
    return f"init {stack.state('init')}, the others stayed"


def stopped(stack: Stack) -> str:
    began = time.monotonic()
    stack.compose("stop")
    took = time.monotonic() - began
    codes = {service: stack.inspect(service)["State"]["ExitCode"] for service in SERVICES}
    if bad := {s: code for s, code in codes.items() if code not in GOOD_ENDS.get(s, (0,))}:
        raise CheckError(f"exit codes {bad}")
    stack.up(UP_S)
    return f"in {took:.1f} s, exit codes {', '.join(f'{s} {code}' for s, code in codes.items())}"


def kept(stack: Stack) -> str:
    """The same incidents, no row lost or twice, no second history of the simulator."""
    before, incidents = rows(stack), identities(stack)
    stack.compose("down")
    stack.up(UP_S)
    seen = whole(stack)
    after, twice = rows(stack), stack.sql(TWICE.format(table="gpu", since="2000-01-01"))[0][0]
    if not before <= after <= GROWTH * before or twice:
        raise CheckError(f"{before} rows of GPUs before, {after} after, {twice} of them twice")
    if gone := incidents - identities(stack):
        raise CheckError(f"incidents are gone: {', '.join(sorted(gone))}")
    return f"{before} -> {after} rows of GPUs, none twice, all {len(incidents)} incidents there; {seen}"


def rows(stack: Stack) -> int:
    return int(stack.sql("SELECT count(*) FROM gpu")[0][0])


def identities(stack: Stack) -> set[str]:
    answer: Any = stack.ask("/api/v1/incidents")[1]
    return {incident["id"] for incident in answer["incidents"]}
