"""Rows of impacts, jobs and the pace of jobs. Writes go into the caller's transaction.

`impact` has a row per incident, kept while it is open and frozen when it is resolved; `impact_jobs` a row per job in
it; `jobs` a row per run of a job; `job_pace` a row per job and minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import duckdb

from pipeline.incidents.impact import ImpactBook, Tracked
from pipeline.incidents.impact_texts import UNLISTED
from pipeline.incidents.job_loss import HOUR, JobLoss
from pipeline.incidents.job_pace import KEPT_MINUTES, MINUTE, Minute
from pipeline.incidents.jobs import KEPT, Job, JobBook, Newest
from pipeline.model.job_effect import read_doubt, split_doubt
from pipeline.model.records import SECOND, Incident, iso

WRITE_EVERY = 30 * SECOND
"""Time between two writes of impacts that only grow (us, by the clock). Chosen: a page is refreshed as often."""
MOST_WRITTEN = 500
"""Impacts in one transaction; the others follow in the next. Chosen: an eighth of a second of CPU."""
_IMPACT = """
INSERT OR REPLACE INTO impact
SELECT unnest($1::VARCHAR[]), make_timestamptz(unnest($2::BIGINT[])), unnest($3::INTEGER[]), unnest($4::INTEGER[]),
       unnest($5::INTEGER[]), unnest($6::INTEGER[]), unnest($7::DOUBLE[]), unnest($8::DOUBLE[]), unnest($9::DOUBLE[]),
       unnest($10::VARCHAR[]), unnest($11::BOOLEAN[]), unnest($12::VARCHAR[]), unnest($13::VARCHAR[])
"""
_IMPACT_JOBS = """
INSERT INTO impact_jobs
SELECT unnest($1::VARCHAR[]), unnest($2::VARCHAR[]), unnest($3::VARCHAR[]), unnest($4::DOUBLE[]),
       unnest($5::INTEGER[]), unnest($6::INTEGER[]), unnest($7::DOUBLE[]), unnest($8::DOUBLE[]), unnest($9::VARCHAR[])
"""
_JOBS = """
INSERT OR REPLACE INTO jobs
SELECT unnest($1::VARCHAR[]), make_timestamptz(unnest($2::BIGINT[])), make_timestamptz(unnest($3::BIGINT[])),
       unnest($4::VARCHAR[]), unnest($5::VARCHAR[]), unnest($6::VARCHAR[]), unnest($7::VARCHAR[]),
       unnest($8::INTEGER[]), unnest($9::INTEGER[]), unnest($10::VARCHAR[][]), make_timestamptz(unnest($11::BIGINT[])),
       unnest($12::BOOLEAN[]), unnest($13::DOUBLE[]), unnest($14::DOUBLE[]), make_timestamptz(unnest($15::BIGINT[])),
       unnest($16::BOOLEAN[])
"""
_PACE = """
INSERT INTO job_pace
SELECT unnest($1::VARCHAR[]), make_timestamptz(unnest($2::BIGINT[])), unnest($3::DOUBLE[]), unnest($4::DOUBLE[]),
       unnest($5::BIGINT[])
"""

_STEPS = "job_steps"
"""Row of `meta` with the number of the newest step of each running job, which no column of `jobs` has: the version
before writes rows of that table without naming columns."""
_JOB = (
    *("entity", "started", "name", "account", "user", "scheduler", "ended", "ranks", "gpus", "nodes", "checkpoint"),
    "simulated",
)


class ImpactWriter:
    """Writes what changed in the books of impacts and jobs. `done` follows the commit; without it all is written again.

    revision: counts writes that people can see.
    """

    def __init__(self, impact: ImpactBook) -> None:
        self._impact, self._jobs = impact, impact.jobs
        self._written: list[tuple[str, Tracked]] = []
        self._changed: set[str] = set()
        self._minutes = 0
        self._last = 0
        self.revision = 0

    def write(self, connection: duckdb.DuckDBPyConnection, now: int) -> None:
        """Writes new, ended and changed impacts, changed jobs and closed minutes."""
        due = abs(now - self._last) >= WRITE_EVERY
        dirty = self._impact.dirty
        chosen = list(dirty.items()) if due else [(i, t) for i, t in dirty.items() if not t.written or t.frozen]
        self._written = chosen[:MOST_WRITTEN]
        if self._written:
            self._write_impacts(connection, [t for _, t in self._written])
        minutes = self._jobs.minutes
        self._minutes, self._changed = len(minutes), self._jobs.changed | {job for job, _ in minutes}
        if minutes:
            rows = [(job, m.time, m.step_time, m.steps, m.pause) for job, m in minutes]
            connection.execute(_PACE, [list(column) for column in zip(*rows, strict=True)])
        if self._changed:
            _write_jobs(connection, self._jobs, self._changed)
        self._last = now if due else self._last

    def done(self, now: int) -> None:
        """The transaction is committed."""
        for id_, tracked in self._written:
            tracked.written = now
            if self._impact.dirty.get(id_) is tracked:
                del self._impact.dirty[id_]
        self._jobs.changed -= self._changed
        del self._jobs.minutes[: self._minutes]
        self.revision += bool(self._written)
        self._written, self._changed, self._minutes = [], set(), 0

    def _write_impacts(self, connection: duckdb.DuckDBPyConnection, written: Sequence[Tracked]) -> None:
        rows, jobs = [], []
        for tracked in written:
            found, id_ = self._impact.describe(tracked), tracked.incident.id
            cost = found["cost"] or {"amount": None, "currency": None}
            numbers = (found[name] for name in ("gpus", "nodes", "ranks", "job_count"))
            lost = (found["lost_gpu_hours"], found["lost_gpu_hours_per_hour"])
            state = json.dumps([_encode_loss(loss) for loss in tracked.jobs.values()])
            about = (cost["amount"], cost["currency"], tracked.frozen, json.dumps(found), state)
            rows.append((id_, tracked.measured, *numbers, *lost, *about))
            jobs += [(id_, *_job_row(loss, tracked.frozen)) for loss in tracked.listed()]
        connection.execute(_IMPACT, [list(column) for column in zip(*rows, strict=True)])
        connection.execute(
            "DELETE FROM impact_jobs WHERE incident IN (SELECT unnest($1::VARCHAR[]))", [[row[0] for row in rows]]
        )
        if jobs:
            connection.execute(_IMPACT_JOBS, [list(column) for column in zip(*jobs, strict=True)])


def _encode_loss(loss: JobLoss) -> dict[str, Any]:
    """Returns a loss as it is stored: the doubt is in `basis`, so that the version before can read it as well."""
    values = {name: value for name, value in asdict(loss).items() if name not in ("doubt", "reached")}
    return {**values, "basis": loss.effect}


def _job_row(loss: JobLoss, frozen: bool) -> tuple[Any, ...]:
    rate = 0.0 if frozen else loss.rate
    return (
        *(loss.job, loss.state, loss.slowdown, loss.gpus, len(loss.ranks)),
        *(loss.lost / HOUR, rate, loss.effect),
    )


def _write_jobs(connection: duckdb.DuckDBPyConnection, book: JobBook, changed: Iterable[str]) -> None:
    rows = []
    for entity in sorted(changed):
        job, pace = book.jobs.get(entity), book.paces.jobs.get(entity)
        if job is None:
            continue
        now = None if pace is None else pace.recent(0, pace.moved_at)
        moved = pace.moved_at if pace is not None and pace.moved_at else None
        rows.append(
            (
                *(job.entity, job.started, job.ended, job.name, job.account, job.user, job.scheduler, job.ranks),
                *(job.gpus, list(job.nodes), job.checkpoint, job.simulated, now, pace.usual if pace else None),
                *(moved, pace is not None and job.ended is None and pace.hangs_at(book.time)),
            )
        )
    if rows:
        connection.execute(_JOBS, [list(column) for column in zip(*rows, strict=True)])
        paces = ((job.entity, book.paces.jobs.get(job.entity)) for job in book.running())
        steps = {job: [p.moved_at, p.step, p.reported_at] for job, p in paces if p is not None and p.step >= 0}
        connection.execute("INSERT OR REPLACE INTO meta VALUES ($1, $2)", [_STEPS, json.dumps(steps)])


# --- reading ------------------------------------------------------------------------------------------


def load_books(connection: duckdb.DuckDBPyConnection, book: ImpactBook, open_: Iterable[Incident], time: int) -> None:
    """Restores the jobs, their pace, and the impact of open incidents after a restart."""
    rows = connection.execute(
        """SELECT job, epoch_us(started), name, account, "user", scheduler, epoch_us(ended), ranks, gpus, nodes,
                  epoch_us(checkpoint), simulated, epoch_us(moved) FROM jobs
           WHERE ended IS NULL OR ended >= make_timestamptz($1::BIGINT) ORDER BY started""",
        [time - KEPT],
    ).fetchall()
    jobs = [Job(**{**dict(zip(_JOB, row[:-1], strict=True)), "nodes": tuple(row[9])}) for row in rows]
    newest = {row[0]: Newest(row[-1]) for row in rows if row[-1] is not None}  # of the newest run: in order of start
    for job, (moved, step, reported) in _read_steps(connection).items():
        if job in newest and newest[job].moved <= moved:  # else a version without this row has written since
            newest[job] = Newest(moved, step, reported)
    minutes = connection.execute(
        """SELECT job, epoch_us(time), step_time, steps, pause FROM job_pace WHERE time >= make_timestamptz($1::BIGINT)
           AND job IN (SELECT unnest($2::VARCHAR[])) ORDER BY time""",
        [time - KEPT_MINUTES * MINUTE, [job.entity for job in jobs]],
    ).fetchall()
    book.jobs.listings.load(connection)
    book.jobs.load(jobs, [(job, Minute(*values)) for job, *values in minutes], time, newest)
    incidents = {incident.id: incident for incident in open_}
    found = connection.execute(
        "SELECT incident, epoch_us(time), state FROM impact WHERE incident IN (SELECT unnest($1::VARCHAR[]))",
        [list(incidents)],
    ).fetchall()
    known = {id_: (measured, text) for id_, measured, text in found}
    for id_, incident in incidents.items():
        measured, text = known.get(id_, (0, "[]"))
        book.restore(Tracked(incident, measured=measured, written=measured, jobs=_decode_losses(text)))
    resolved = connection.execute(
        """SELECT m.incident, epoch_us(i.onset), m.state FROM impact m JOIN incidents i ON i.id = m.incident
           WHERE i.resolved >= make_timestamptz($1::BIGINT) AND m.lost_gpu_hours > 0""",
        [time - KEPT],
    ).fetchall()
    for id_, onset, text in resolved:  # they do not count on, and what they counted is not counted again
        book.claim(id_, onset, _decode_losses(text).values())


def _read_steps(connection: duckdb.DuckDBPyConnection) -> dict[str, tuple[int, float, int]]:
    """Returns job -> when its newest step was made, its number, and when its ranks reported it last."""
    row = connection.execute("SELECT value FROM meta WHERE key = $1", [_STEPS]).fetchone()
    return {} if row is None else json.loads(row[0])


def load_losses(connection: duckdb.DuckDBPyConnection, incident: str) -> dict[str, JobLoss]:
    """Returns what a resolved incident cost each job, so that a reopened one goes on from there."""
    row = connection.execute("SELECT state FROM impact WHERE incident = $1", [incident]).fetchone()
    return {} if row is None else _decode_losses(row[0])


def _decode_losses(text: str) -> dict[str, JobLoss]:
    return {values["job"]: _decode_loss(values) for values in json.loads(text)}


def _decode_loss(values: Mapping[str, Any]) -> JobLoss:
    doubt, basis = split_doubt(values["basis"])
    known = {field.name: values[field.name] for field in fields(JobLoss) if field.name in values}
    more = {"basis": basis, "doubt": read_doubt(doubt), "reached": not doubt or bool(basis)}
    return JobLoss(**{**known, **more, "ranks": tuple(values["ranks"])})


def read_impact(cursor: duckdb.DuckDBPyConnection, incident: str) -> dict[str, Any] | None:
    """Returns the impact of an incident in the form of the API; None for one of an older store."""
    row = cursor.execute("SELECT detail FROM impact WHERE incident = $1", [incident]).fetchone()
    return None if row is None else {UNLISTED: 0, **json.loads(row[0])}  # a row of an older version has no such field


def read_short_impacts(cursor: duckdb.DuckDBPyConnection) -> Mapping[str, dict[str, Any]]:
    """Returns incident -> its impact in numbers, of all incidents."""
    names = ("gpus", "nodes", "ranks", "jobs", "lost_gpu_hours", "lost_gpu_hours_per_hour", "cost")
    unlisted = f"coalesce(CAST(detail ->> '$.{UNLISTED}' AS INTEGER), 0)"
    rows = cursor.execute(f"SELECT incident, {', '.join(names)}, {unlisted} FROM impact").fetchall()
    return {incident: dict(zip((*names, UNLISTED), values, strict=True)) for incident, *values in rows}


def read_affected(cursor: duckdb.DuckDBPyConnection) -> Mapping[str, str]:
    """Returns incident -> affected jobs or ranks, for its title."""
    query = "SELECT incident, detail ->> '$.title' AS title FROM impact WHERE title <> ''"
    return dict(cursor.execute(query).fetchall())


_LIST = """
WITH run AS (SELECT * FROM jobs WHERE ($1 IS NULL OR job = $1) AND ($2 OR ended IS NULL)),
     harm AS (
    SELECT r.job, r.started, sum(m.lost_gpu_hours) AS lost, sum(m.lost_gpu_hours_per_hour) AS rate,
           list(i.id ORDER BY i.onset, i.id) FILTER (i.resolved IS NULL) AS open
    FROM run r JOIN impact_jobs m ON m.job = r.job JOIN incidents i ON i.id = m.incident
    WHERE (i.resolved IS NULL OR i.resolved >= r.started) AND (r.ended IS NULL OR i.onset <= r.ended)
    GROUP BY r.job, r.started)
SELECT r.job, r.name, r.account, r."user", r.scheduler, epoch_us(r.started), epoch_us(r.ended), r.ranks, r.gpus,
       r.nodes, r.simulated, r.step_time, r.usual_step_time, epoch_us(r.moved), r.hanging, epoch_us(r.checkpoint),
       coalesce(h.lost, 0), coalesce(h.rate, 0), coalesce(h.open, [])
FROM run r LEFT JOIN harm h ON h.job = r.job AND h.started = r.started
ORDER BY r.ended IS NOT NULL, r.gpus DESC, r.started DESC, r.job LIMIT $3
"""


def list_jobs(
    cursor: duckdb.DuckDBPyConnection, job: str | None = None, ended: bool = True, most: int = 1000
) -> list[dict[str, Any]]:
    """Returns runs of jobs in the form of the API: running ones first, the largest first. job: only its runs."""
    return [_job_as_json(row) for row in cursor.execute(_LIST, [job, ended, most]).fetchall()]


def _job_as_json(row: tuple[Any, ...]) -> dict[str, Any]:
    job, name, account, user, scheduler, started, ended, ranks, gpus, nodes, simulated = row[:11]
    step, usual, moved, hanging, checkpoint, lost, rate, incidents = row[11:]
    running = ended is None
    return {
        "job": job,
        "name": name,
        "account": account,
        "user": user,
        "scheduler": scheduler,
        "state": "ended" if not running else "hanging" if hanging else "running",
        "started": iso(started),
        "ended": None if running else iso(ended),
        "ranks": ranks,
        "gpus": gpus,
        "nodes": nodes,
        "simulated": simulated,
        "step_time": step,
        "usual_step_time": usual,
        "slowdown": step / usual - 1 if running and step and usual else None,
        "last_step": None if moved is None else iso(moved),
        "last_report": None,
        "checkpoint": None if checkpoint is None else iso(checkpoint),
        "lost_gpu_hours": round(lost, 3),
        "lost_gpu_hours_per_hour": round(rate, 3),
        "incidents": incidents,
    }


def read_pace(cursor: duckdb.DuckDBPyConnection, job: str, since: int) -> list[dict[str, Any]]:
    """Returns the minutes of a job in which it made steps, oldest first."""
    rows = cursor.execute(
        """SELECT epoch_us(time), step_time, steps FROM job_pace
           WHERE job = $1 AND time >= make_timestamptz($2::BIGINT) ORDER BY time""",
        [job, since],
    ).fetchall()
    return [{"time": iso(time), "step_time": step_time, "steps": steps} for time, step_time, steps in rows]


def list_job_incidents(cursor: duckdb.DuckDBPyConnection, job: str, most: int = 200) -> list[dict[str, Any]]:
    """Returns the incidents that reached a job, open ones first, then the newest."""
    rows = cursor.execute(
        """SELECT i.id, i.summary, i.severity, epoch_us(i.onset), epoch_us(i.resolved), m.state, m.slowdown, m.basis,
                  m.lost_gpu_hours, m.lost_gpu_hours_per_hour, i.detector
           FROM impact_jobs m JOIN incidents i ON i.id = m.incident WHERE m.job = $1
           ORDER BY i.resolved IS NOT NULL, i.onset DESC, i.id LIMIT $2""",
        [job, most],
    ).fetchall()
    names = ("id", "summary", "severity", "onset", "resolved", "state", "slowdown", "basis", "lost_gpu_hours")
    return [
        {
            **dict(zip(names, row[:9], strict=True)),
            "onset": iso(row[3]),
            "resolved": None if row[4] is None else iso(row[4]),
            "lost_gpu_hours_per_hour": row[9],
            "detector": row[10],
        }
        for row in rows
    ]
