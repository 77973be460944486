"""The broker is killed and returns: /readyz reports it, nothing is lost or duplicated, and nothing needs a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stack import CheckError, Stack, command, wait

MEMORY_PERCENT = 80
"""Most of a limit that a service may use after an outage. Chosen: a fifth is left for a longer one."""
AWAY_S = 45
"""How long the broker is gone. Chosen: longer than the 30 s within which a fault must be reported."""
TOLD_S, READY_S, CAUGHT_UP_S = 30, 120, 120
"""30: a failure has to be visible within that. The others are chosen: a killed broker starts in 5 to 15 s when busy."""
STEPS = """
    SELECT entity, max(step) AS longest, count(*) AS steps FROM (
        SELECT entity, epoch_us(time) - lag(epoch_us(time)) OVER (PARTITION BY entity ORDER BY time) AS step
        FROM node WHERE time >= TIMESTAMPTZ '{since}') GROUP BY entity ORDER BY entity"""
TWICE = "SELECT count(*) - count(DISTINCT (entity, time)) FROM {table} WHERE time > TIMESTAMPTZ '{since}'"
INTERVALS_US = {"simulated": 10_000_000, "real": 1_000_000}
"""Between two rows of a node: of scenario `demo`, and [agent] interval."""


def broker_outage(stack: Stack, report: Callable[[str, Callable[[], str]], bool]) -> None:
    """The checks of one outage, in order."""
    report("before the outage everything is stored and no gap is counted", lambda: whole(stack))
    since, (gone, before) = newest(stack), usage(stack)
    killed = time.monotonic()
    command("docker", "kill", stack.container("kafka"))
    report("/readyz reports that the broker is gone", lambda: unready(stack))
    report("/healthz and the stored rows are served without it", lambda: served(stack))
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - killed)))
    report("services live on without it", lambda: alive(stack))
    stack.compose("start", "kafka")
    if report("/readyz is well again after the broker's return", lambda: ready(stack)):
        report("new rows arrive", lambda: caught_up(stack))
        report("nothing was lost and nothing is there twice", lambda: complete(stack, since))
    report("memory stays well below its limits", lambda: within(gone, before, usage(stack)[1]))


def newest(stack: Stack) -> str:
    return str(stack.sql("SELECT max(time) FROM node")[0][0])


def whole(stack: Stack) -> str:
    """No backlog, no gap, no dead letter."""

    def look() -> dict[str, Any] | None:
        status, fleet = stack.ask("/api/v1/fleet")
        return fleet if status == 200 and not fleet["backlog"] else None

    fleet, _ = wait(60, "an empty backlog", look)
    sources = fleet["sources"]
    if sources["gaps"] or sources["dead_letters"]:
        raise CheckError(f"{sources}; wanted no gap and no dead letter")
    return f"{sources['agents']} agents, {sources['silent']} silent, no gap, no dead letter, lag {fleet['lag_s']:.0f} s"


def unready(stack: Stack) -> str:
    def look() -> str | None:
        status, answer = stack.ask("/readyz")
        return "; ".join(answer["reasons"]) if status == 503 else None

    reason, took = wait(TOLD_S, "/readyz with 503", look)
    if "kafka:19092" not in reason:
        raise CheckError(f"{reason!r} does not name the broker kafka:19092")
    return f"503 after {took:.1f} s: {reason}"


def served(stack: Stack) -> str:
    status, rows = stack.ask("/healthz", token=False)[0], stack.sql("SELECT count(*) FROM node")[0][0]
    if status != 200 or not rows:
        raise CheckError(f"/healthz {status}, {rows} rows")
    return f"/healthz {status}, {rows} rows of nodes"


def alive(stack: Stack) -> str:
    for service in ("pipeline", "agent", "simulator", "dashboard"):
        found = stack.inspect(service)
        if found["State"]["Status"] != "running" or found["RestartCount"]:
            raise CheckError(f"{service} is {found['State']['Status']}, restarted {found['RestartCount']} times")
    return f"none ended or was restarted in {AWAY_S} s"


def ready(stack: Stack) -> str:
    _, took = wait(READY_S, "/readyz with 200", lambda: stack.ask("/readyz")[0] == 200 or None)
    return f"200 after {took:.1f} s, of which the broker's start is a part"


def caught_up(stack: Stack) -> str:
    """Every node has rows that were measured after the broker's return."""
    since = stack.sql("SELECT now()")[0][0]
    nodes = stack.sql("SELECT count(DISTINCT entity) FROM node")[0][0]
    query = f"SELECT count(DISTINCT entity) FROM node WHERE time > TIMESTAMPTZ '{since}'"
    _, took = wait(CAUGHT_UP_S, f"rows of all {nodes} nodes", lambda: stack.sql(query)[0][0] == nodes or None)
    return f"of all {nodes} nodes after {took:.1f} s"


def complete(stack: Stack, since: str) -> str:
    """Rows of each node follow one another at its interval, from before the outage until now."""
    whole(stack)
    rows = stack.sql(STEPS.format(since=since))
    holes = [
        f"{entity}: {longest / 1e6:.1f} s"
        for entity, longest, _ in rows
        if longest > 1.5 * INTERVALS_US["simulated" if entity.startswith("node:sim-") else "real"]
    ]
    twice = {t: n for t in ("node", "gpu", "nic") if (n := stack.sql(TWICE.format(table=t, since=since))[0][0])}
    if holes or twice:
        raise CheckError(f"holes: {holes or 'none'}; rows there twice: {twice or 'none'}")
    return f"{sum(steps for _, _, steps in rows)} rows of {len(rows)} nodes without a hole, none twice, no gap counted"


def usage(stack: Stack) -> tuple[str, dict[str, tuple[str, float]]]:
    """(Table of what each container uses, service -> memory and its share of the limit in percent) now."""
    columns = "table {{.Name}}\t{{.CPUPerc}}\t{{.MemUsage}}\t{{.MemPerc}}\t{{.PIDs}}"
    table = command("docker", "stats", "--no-stream", "--format", columns, *stack.compose("ps", "--quiet").split())
    lines = [line.split() for line in table.splitlines()[1:]]
    return table.strip(), {words[0].split("-")[-2]: (words[2], float(words[5].rstrip("%"))) for words in lines}


def within(table: str, before: dict[str, tuple[str, float]], after: dict[str, tuple[str, float]]) -> str:
    """The table is that from before the outage."""
    print(table)
    if missing := set(before) - set(after):
        raise CheckError(f"{', '.join(sorted(missing))}: not running")
    if full := [f"{service} {share:.0f} %" for service, (_, share) in after.items() if share > MEMORY_PERCENT]:
        raise CheckError(f"{', '.join(full)} of the limit; wanted at most {MEMORY_PERCENT} %")
    return ", ".join(f"{service} {before[service][0]} -> {after[service][0]}" for service in sorted(before))
