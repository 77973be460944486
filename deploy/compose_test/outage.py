"""An outage of the broker: /readyz reports it, no data is lost or duplicated, and no service needs a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stack import CheckError, Stack, run_command, wait_for

MEMORY_PERCENT = 80
"""Maximum use of a memory limit after an outage (%). Chosen: leaves a fifth for a longer outage."""
OUTAGE_S = 45
"""Duration of the outage. Chosen: longer than the 30 s within which it must be reported."""
UNREADY_S, READY_S, CAUGHT_UP_S = 30, 120, 120
"""Limits. 30: required for any failure. Others chosen: a killed broker starts in 5 to 15 s on a busy machine."""
STEPS_QUERY = """
    SELECT entity, max(step) AS longest, count(*) AS steps FROM (
        SELECT entity, epoch_us(time) - lag(epoch_us(time)) OVER (PARTITION BY entity ORDER BY time) AS step
        FROM node WHERE time >= TIMESTAMPTZ '{since}') GROUP BY entity ORDER BY entity"""
DUPLICATES = "SELECT count(*) - count(DISTINCT (entity, time)) FROM {table} WHERE time > TIMESTAMPTZ '{since}'"
INTERVALS_US = {"simulated": 10_000_000, "real": 1_000_000}
"""Time between two rows of a node: of scenario `demo`, and [agent] interval."""


def check_broker_outage(stack: Stack, report: Callable[[str, Callable[[], str]], bool]) -> None:
    """Runs the checks of one outage in order."""
    report("before the outage all data is stored, without gaps", lambda: check_completeness(stack))
    since, (gone, before) = newest_time(stack), read_usage(stack)
    killed = time.monotonic()
    run_command("docker", "kill", stack.container_id("kafka"))
    report("/readyz reports that the broker is down", lambda: wait_until_unready(stack))
    report("/healthz and stored rows are served during the outage", lambda: check_served(stack))
    time.sleep(max(0.0, OUTAGE_S - (time.monotonic() - killed)))
    report("services keep running during the outage", lambda: check_running(stack))
    stack.compose("start", "kafka")
    if report("/readyz reports ready after the broker restarts", lambda: wait_until_ready(stack)):
        report("new rows arrive", lambda: wait_for_new_rows(stack))
        report("no row is lost or duplicated", lambda: check_no_holes(stack, since))
    report("memory stays below 80 % of its limits", lambda: check_memory(gone, before, read_usage(stack)[1]))


def newest_time(stack: Stack) -> str:
    """Returns the time of the newest row of a node."""
    return str(stack.sql("SELECT max(time) FROM node")[0][0])


def check_completeness(stack: Stack) -> str:
    """Waits for an empty backlog. Raises CheckError if there are gaps or dead letters."""

    def read() -> dict[str, Any] | None:
        status, fleet = stack.request("/api/v1/fleet")
        return fleet if status == 200 and not fleet["backlog"] else None

    fleet, _ = wait_for(60, "an empty backlog", read)
    sources = fleet["sources"]
    if sources["gaps"] or sources["dead_letters"]:
        raise CheckError(f"{sources}; expected no gaps and no dead letters")
    return f"{sources['agents']} agents, {sources['silent']} silent, no gap, no dead letter, lag {fleet['lag_s']:.0f} s"


def wait_until_unready(stack: Stack) -> str:
    """Waits until /readyz answers 503 with a reason that names the broker."""

    def read() -> str | None:
        status, answer = stack.request("/readyz")
        return "; ".join(answer["reasons"]) if status == 503 else None

    reason, took = wait_for(UNREADY_S, "/readyz with 503", read)
    if "kafka:19092" not in reason:
        raise CheckError(f"{reason!r} does not name the broker kafka:19092")
    return f"503 after {took:.1f} s: {reason}"


def check_served(stack: Stack) -> str:
    """Checks that /healthz answers and stored rows can be queried."""
    status, rows = stack.request("/healthz", token=False)[0], stack.sql("SELECT count(*) FROM node")[0][0]
    if status != 200 or not rows:
        raise CheckError(f"/healthz {status}, {rows} rows")
    return f"/healthz {status}, {rows} rows of nodes"


def check_running(stack: Stack) -> str:
    """Checks that no service stopped or restarted."""
    for service in ("pipeline", "agent", "simulator", "dashboard"):
        found = stack.inspect(service)
        if found["State"]["Status"] != "running" or found["RestartCount"]:
            raise CheckError(f"{service} is {found['State']['Status']}, restarted {found['RestartCount']} times")
    return f"no service stopped or restarted in {OUTAGE_S} s"


def wait_until_ready(stack: Stack) -> str:
    """Waits until /readyz answers 200."""
    _, took = wait_for(READY_S, "/readyz with 200", lambda: stack.request("/readyz")[0] == 200 or None)
    return f"200 after {took:.1f} s, including the start of the broker"


def wait_for_new_rows(stack: Stack) -> str:
    """Waits until every node has rows that were measured after the broker restarted."""
    since = stack.sql("SELECT now()")[0][0]
    nodes = stack.sql("SELECT count(DISTINCT entity) FROM node")[0][0]
    query = f"SELECT count(DISTINCT entity) FROM node WHERE time > TIMESTAMPTZ '{since}'"
    _, took = wait_for(CAUGHT_UP_S, f"rows of all {nodes} nodes", lambda: stack.sql(query)[0][0] == nodes or None)
    return f"from all {nodes} nodes after {took:.1f} s"


def check_no_holes(stack: Stack, since: str) -> str:
    """Checks that each node has a row per interval since before the outage, and no duplicates."""
    check_completeness(stack)
    rows = stack.sql(STEPS_QUERY.format(since=since))
    holes = [
        f"{entity}: {longest / 1e6:.1f} s"
        for entity, longest, _ in rows
        if longest > 1.5 * INTERVALS_US["simulated" if entity.startswith("node:sim-") else "real"]
    ]
    twice = {t: n for t in ("node", "gpu", "nic") if (n := stack.sql(DUPLICATES.format(table=t, since=since))[0][0])}
    if holes or twice:
        raise CheckError(f"holes: {holes or 'none'}; duplicates: {twice or 'none'}")
    return f"{sum(steps for _, _, steps in rows)} rows of {len(rows)} nodes without holes, duplicates or gaps"


def read_usage(stack: Stack) -> tuple[str, dict[str, tuple[str, float]]]:
    """Returns (table of resource usage, service -> (memory, percent of its limit))."""
    columns = "table {{.Name}}\t{{.CPUPerc}}\t{{.MemUsage}}\t{{.MemPerc}}\t{{.PIDs}}"
    table = run_command("docker", "stats", "--no-stream", "--format", columns, *stack.compose("ps", "--quiet").split())
    lines = [line.split() for line in table.splitlines()[1:]]
    return table.strip(), {words[0].split("-")[-2]: (words[2], float(words[5].rstrip("%"))) for words in lines}


def check_memory(table: str, before: dict[str, tuple[str, float]], after: dict[str, tuple[str, float]]) -> str:
    """Checks memory after the outage. table: usage before the outage, printed."""
    print(table)
    if missing := set(before) - set(after):
        raise CheckError(f"{', '.join(sorted(missing))}: not running")
    if full := [f"{service} {share:.0f} %" for service, (_, share) in after.items() if share > MEMORY_PERCENT]:
        raise CheckError(f"{', '.join(full)} of the limit; expected at most {MEMORY_PERCENT} %")
    return ", ".join(f"{service} {before[service][0]} -> {after[service][0]}" for service in sorted(before))
