"""Restarts of a running system: a second `up`, `stop` and `up`, `down` and `up`. No data may be lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outage import DUPLICATES, check_completeness
from stack import SERVICES, CheckError, Stack

UP_S = 300
"""Limit of one `up`. Chosen: the first one takes one to two minutes, with the history."""
GOOD_ENDS = {"kafka": (0, 143)}
"""Accepted exit codes of services that do not return 0. 143: Java after SIGTERM. 137: killed after the grace period."""
GROWTH = 1.1
"""Maximum ratio of rows after and before. Chosen: a second history doubles them, a few minutes add 1 %."""


def check_restarts(stack: Stack, report: Callable[[str, Callable[[], str]], bool]) -> None:
    """Runs the checks of restarts in order."""
    report("`up --wait` again changes nothing", lambda: repeat_up(stack))
    report("all services stop within their grace period", lambda: stop_and_start(stack))
    report("`down`, then `up --wait`: all data is kept", lambda: recreate_stack(stack))


def repeat_up(stack: Stack) -> str:
    """Runs `up` again: `init` runs a second time beside the running pipeline and must not disturb it."""
    before = stack.container_id("pipeline")
    stack.up(UP_S)
    if stack.container_id("pipeline") != before:
        raise CheckError("the pipeline's container was recreated")
    return f"init {stack.state('init')}, the other containers were kept"


def stop_and_start(stack: Stack) -> str:
    """Stops and starts all services. Raises CheckError for an unexpected exit code."""
    began = time.monotonic()
    stack.compose("stop")
    took = time.monotonic() - began
    codes = {service: stack.inspect(service)["State"]["ExitCode"] for service in SERVICES}
    if bad := {s: code for s, code in codes.items() if code not in GOOD_ENDS.get(s, (0,))}:
        raise CheckError(f"exit codes {bad}")
    stack.up(UP_S)
    return f"in {took:.1f} s, exit codes {', '.join(f'{s} {code}' for s, code in codes.items())}"


def recreate_stack(stack: Stack) -> str:
    """Runs `down` and `up`: the same incidents, no row lost or duplicated, no second history of the simulator."""
    before, incidents = count_rows(stack), incident_ids(stack)
    stack.compose("down")
    stack.up(UP_S)
    seen = check_completeness(stack)
    after, twice = count_rows(stack), stack.sql(DUPLICATES.format(table="gpu", since="2000-01-01"))[0][0]
    if not before <= after <= GROWTH * before or twice:
        raise CheckError(f"{before} rows of GPUs before, {after} after, {twice} duplicates")
    if gone := incidents - incident_ids(stack):
        raise CheckError(f"missing incidents: {', '.join(sorted(gone))}")
    return f"{before} -> {after} rows of GPUs, no duplicates, all {len(incidents)} incidents kept; {seen}"


def count_rows(stack: Stack) -> int:
    """Returns the number of rows of GPUs."""
    return int(stack.sql("SELECT count(*) FROM gpu")[0][0])


def incident_ids(stack: Stack) -> set[str]:
    """Returns the ids of all incidents."""
    answer: Any = stack.request("/api/v1/incidents")[1]
    return {incident["id"] for incident in answer["incidents"]}
