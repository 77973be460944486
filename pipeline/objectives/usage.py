"""How much of a fleet, a tenant or a job was there in a time, and how much of that was lost, from the store.

Goodput: the total is the GPU-hours that jobs held, the loss what incidents cost them (`job_loss`). Availability: the
total is node-hours, the loss those in which a node was out of service (pipeline/objectives/outages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import duckdb

from pipeline.config.objectives import Objective
from pipeline.model.records import SECOND
from pipeline.objectives.budget import Usage
from pipeline.objectives.outages import Outages

HOUR = 3600 * SECOND
MOST_EACH = 200
"""Accounts or jobs that one objective with `*` is for, the largest. Chosen: what a page shows."""
_RUNS = """
SELECT job, account, gpus, nodes, greatest(epoch_us(started), $1), least(coalesce(epoch_us(ended), $2), $2),
       step_time IS NOT NULL
FROM jobs WHERE started < make_timestamptz($2::BIGINT) AND (ended IS NULL OR ended > make_timestamptz($1::BIGINT))
"""
_LOST = """
SELECT l.job, a.account, sum(l.gpu_hours) FROM job_loss l
LEFT JOIN (SELECT job, arg_max(account, started) AS account FROM jobs GROUP BY job) a USING (job)
WHERE l.time >= make_timestamptz($1::BIGINT) AND l.time < make_timestamptz($2::BIGINT) GROUP BY ALL
"""


class UsageReader:
    """Reads usages of one moment. nodes: of the fleet today.   since: nothing before it counts (us), as the store is
    not older."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, outages: Outages, nodes: Collection[str], since: int) -> None:
        self._cursor, self._outages, self._nodes, self._since = cursor, outages, nodes, since
        self._runs: dict[tuple[int, int], list[tuple[str, str, int, list[str], int, int, bool]]] = {}
        self._lost: dict[tuple[int, int], list[tuple[str, str | None, float]]] = {}

    def measure(self, kind: str, scope: str) -> Callable[[int, int], Usage]:
        """Returns the function that reads the usage of a scope between two times."""
        return (
            (lambda a, b: self._goodput(scope, a, b))
            if kind == "goodput"
            else (lambda a, b: self._availability(scope, a, b))
        )

    def list_scopes(self, objective: Objective, start: int, end: int) -> list[str]:
        """Returns the scopes of an objective: itself, or for `*` each account or job with GPU-hours, largest first."""
        kind, _, name = objective.scope.partition(":")
        if name != "*":
            return [objective.scope]
        hours: dict[str, float] = {}
        for job, account, gpus, _nodes, a, b, _measured in self._read_runs(start, end):
            key = account if kind == "account" else job.removeprefix("job:")
            hours[key] = hours.get(key, 0.0) + gpus * (b - a) / HOUR
        largest = sorted((key for key in hours if key), key=lambda key: (-hours[key], key))
        return [f"{kind}:{key}" for key in largest[:MOST_EACH]]

    def _read_runs(self, start: int, end: int) -> list[tuple[str, str, int, list[str], int, int, bool]]:
        key = start, end
        if key not in self._runs:
            self._runs[key] = self._cursor.execute(_RUNS, [start, end]).fetchall()
        return self._runs[key]

    def _read_lost(self, start: int, end: int) -> list[tuple[str, str | None, float]]:
        key = start, end
        if key not in self._lost:
            self._lost[key] = self._cursor.execute(_LOST, [start, end]).fetchall()
        return self._lost[key]

    def _goodput(self, scope: str, start: int, end: int) -> Usage:
        total = measured = 0.0
        for job, account, gpus, _nodes, a, b, has_steps in self._read_runs(start, end):
            if _is_in(scope, job, account):
                total += gpus * (b - a) / HOUR
                measured += gpus * (b - a) / HOUR if has_steps else 0.0
        lost = sum(hours for job, account, hours in self._read_lost(start, end) if _is_in(scope, job, account or ""))
        return Usage(total, max(0.0, lost), measured / total if total else 1.0)

    def _availability(self, scope: str, start: int, end: int) -> Usage:
        start = max(start, min(self._since, end))
        if scope == "fleet":
            lost = sum(self._outages.hours_of(node, start, end) for node in self._nodes)
            return Usage(len(self._nodes) * (end - start) / HOUR, lost)
        total = lost = 0.0
        down = self._outages.spans.keys()
        for job, account, _gpus, nodes, a, b, _ in self._read_runs(start, end):
            if _is_in(scope, job, account):
                total += len(nodes) * (b - a) / HOUR
                lost += sum(self._outages.hours_of(node, a, b) for node in map(_bare, nodes) if node in down)
        return Usage(total, lost)


def _bare(node: str) -> str:
    return node.removeprefix("node:")


def _is_in(scope: str, job: str, account: str) -> bool:
    kind, _, name = scope.partition(":")
    if kind == "account":
        return account == name
    return kind == "fleet" or job.removeprefix("job:") == name.removeprefix("job:")


def read_start(cursor: duckdb.DuckDBPyConnection, now: int) -> int:
    """Returns since when the store knows the fleet (us): its oldest job, incident, energy or message."""
    found = cursor.execute(
        """SELECT least((SELECT epoch_us(min(started)) FROM jobs), (SELECT epoch_us(min(onset)) FROM incidents),
                        (SELECT epoch_us(min(hour)) FROM job_energy),
                        (SELECT epoch_us(min(committed)) FROM ingest_commit))"""
    ).fetchone()
    return now if found is None or found[0] is None else min(int(found[0]), now)
