"""Which rank of which job ran where and when: intervals in the table `job_rank`, shown by the view `job_membership`.

Written in the transaction of the events that say so: job_start places ranks, job_end ends them, and an inventory does
both for the ranks of its node. The rules are those of pipeline/model/membership.py, which keeps the present in memory;
here the past stays, so that an incident of last week finds the jobs of last week.

One row per rank and device (a GPU; the node where the GPU is not known) and stretch of time. `until` is null while it
runs. `listed`: an inventory of `node` has listed the rank, so one that no longer does ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from pipeline.model.membership import ATTRIBUTE, parse_inventory
from pipeline.model.records import Event, Origin
from pipeline.model.topology import kind_of
from pipeline.store.append import insert_columns, register_columns, to_timestamps

TABLE = """
CREATE TABLE IF NOT EXISTS job_rank (
    rank VARCHAR NOT NULL, job VARCHAR NOT NULL, stage VARCHAR, device VARCHAR NOT NULL, node VARCHAR NOT NULL,
    since TIMESTAMPTZ NOT NULL, "until" TIMESTAMPTZ, listed BOOLEAN NOT NULL, source VARCHAR NOT NULL,
    simulated BOOLEAN NOT NULL);
CREATE OR REPLACE VIEW job_membership AS
SELECT job, rank, try_cast(split_part(rank, '.', -1) AS INTEGER) AS number, stage, device AS entity, node,
       since, "until", source, simulated
FROM job_rank;
"""
PLACED, LISTED, ENDED = 0, 1, 2
"""Order of what happens at one instant: as in pipeline/model/membership.py, an end comes before a start."""
_ORDER = {LISTED: 0, ENDED: 1, PLACED: 2}


@dataclass(frozen=True, slots=True)
class _Placing:
    """A rank on devices. whole: these are all its devices; else it may have more of them."""

    rank: str
    job: str
    stage: str | None
    devices: tuple[str, ...]
    node: str
    whole: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """What one event says. listed: all ranks of the node.  ended: ranks, or a job with all its ranks."""

    time: int
    order: int
    origin: Origin
    placed: tuple[_Placing, ...] = ()
    node: str = ""
    listed: frozenset[str] = frozenset()
    ended: tuple[str, ...] = ()
    job: str = ""


@dataclass(slots=True)
class _Interval:
    """A row of the table. key: (rank, device, since) as it is stored; None if it is not."""

    rank: str
    job: str
    stage: str | None
    device: str
    node: str
    since: int
    until: int | None
    listed: bool
    source: str
    simulated: bool
    key: tuple[str, str, int] | None = None
    changed: bool = False


@dataclass(slots=True)
class _Intervals:
    """Intervals that a commit may touch, by rank, node and job; and those that a change replaced."""

    rows: list[_Interval] = field(default_factory=list)
    by_rank: dict[str, list[_Interval]] = field(default_factory=dict)
    by_node: dict[str, dict[int, _Interval]] = field(default_factory=dict)
    by_job: dict[str, dict[int, _Interval]] = field(default_factory=dict)

    def add(self, row: _Interval) -> None:
        """Adds a row; an open one is found by its node and its job too."""
        self.rows.append(row)
        self.by_rank.setdefault(row.rank, []).append(row)
        if row.until is None:
            self.by_node.setdefault(row.node, {})[id(row)] = row
            self.by_job.setdefault(row.job, {})[id(row)] = row

    def end(self, row: _Interval, time: int) -> None:
        """Ends an open row, unless it began later."""
        if row.until is None and row.since <= time:
            row.until, row.changed = time, True
            self.by_node[row.node].pop(id(row))
            self.by_job[row.job].pop(id(row))

    def apply(self, step: _Step) -> None:
        """Applies what one event says."""
        for placing in step.placed:
            self._place(placing, step)
        for rank in step.ended:
            for row in self.by_rank.get(rank, ()):
                if row.job == step.job:
                    self.end(row, step.time)
        if step.job and not step.ended:
            for row in [*self.by_job.get(step.job, {}).values()]:
                self.end(row, step.time)
        if step.node:
            for row in [*self.by_node.get(step.node, {}).values()]:
                if row.listed and row.rank not in step.listed:
                    self.end(row, step.time)

    def _place(self, placing: _Placing, step: _Step) -> None:
        rows = self.by_rank.get(placing.rank, [])
        past = [r for r in rows if r.until is not None and r.since <= step.time < r.until and r.job == placing.job]
        if past:  # an older message that arrives after the end
            return
        current = [row for row in rows if row.until is None]
        same = [row for row in current if row.job == placing.job]
        on_node = placing.devices == (placing.node,)
        if same and on_node and not any(row.device == placing.node for row in same):
            self._confirm(same, placing, step)  # its GPUs are known from another message
            return
        if any(row.device in placing.devices for row in same) and not placing.whole:
            self._confirm(same, placing, step)
            return
        self._replace(current, same, placing, step)

    def _replace(self, current: list[_Interval], same: list[_Interval], placing: _Placing, step: _Step) -> None:
        """Ends what the rank held elsewhere, and opens what it holds now."""
        # placed on its node before its GPUs were known: they are its GPUs from the beginning
        guessed = next((row for row in same if row.device == row.node == placing.node), None)
        since = step.time if guessed is None else min(guessed.since, step.time)
        kept = {id(row) for row in same if row.device in placing.devices}
        for row in current:
            if row is guessed and placing.devices != (placing.node,):
                row.until, row.changed = row.since, True  # nothing of it stays
                self.by_node[row.node].pop(id(row))
                self.by_job[row.job].pop(id(row))
            elif id(row) not in kept:
                self.end(row, step.time)
        held = {row.device: row for row in same if row.until is None}
        self._confirm(held.values(), placing, step)
        for device in placing.devices:
            if device not in held:
                self.add(
                    _Interval(
                        *(placing.rank, placing.job, placing.stage, device, placing.node, since, None),
                        *(step.order == LISTED, step.origin.node, step.origin.simulated),
                        changed=True,
                    )
                )

    def _confirm(self, rows: Iterable[_Interval], placing: _Placing, step: _Step) -> None:
        """Completes open rows with what a message adds: an earlier begin, the stage."""
        for row in rows:
            since, stage = min(row.since, step.time), placing.stage or row.stage
            listed = row.listed or step.order == LISTED
            if (since, stage, listed) != (row.since, row.stage, row.listed):
                row.since, row.stage, row.listed, row.changed = since, stage, listed, True


def update_job_ranks(connection: duckdb.DuckDBPyConnection, events: Sequence[tuple[Event, Origin]]) -> None:
    """Applies the job_start, job_end and inventory events of a commit to the table, in order of their time."""
    steps = sorted(_read_steps(events), key=lambda step: (step.time, _ORDER[step.order]))
    if not steps:
        return
    known = _load(connection, steps)
    for step in steps:
        known.apply(step)
    _save(connection, [row for row in known.rows if row.changed])


def _read_steps(events: Iterable[tuple[Event, Origin]]) -> Iterator[_Step]:
    for event, origin in events:
        if event.kind == "inventory":
            found = list(_read_listing(event))
            yield _Step(event.time, LISTED, origin, tuple(found), event.entity, frozenset(p.rank for p in found))
        elif event.kind == "job_start" and isinstance(ranks := event.data.get("ranks"), dict):
            placed = tuple(_read_start(event, origin, ranks))
            yield _Step(event.time, PLACED, origin, placed)
        elif event.kind == "job_end":
            named = event.data.get("ranks")
            ended = tuple(r for r in named if isinstance(r, str)) if isinstance(named, (list, dict)) else ()
            if ended or not isinstance(named, (list, dict)):
                yield _Step(event.time, ENDED, origin, ended=ended, job=event.entity)


def _read_listing(event: Event) -> Iterator[_Placing]:
    """The ranks that an inventory lists for its node."""
    node = event.entity.partition(":")[2]
    for entity, parents, attributes in parse_inventory(event.data):
        if kind_of(entity) == "rank" and attributes.get(ATTRIBUTE) == node:
            works = {kind_of(p): p for p in reversed(parents)}
            gpus = tuple(p for p in parents if kind_of(p) == "gpu")
            if "job" in works:
                yield _Placing(entity, works["job"], works.get("stage"), gpus or (event.entity,), event.entity, True)


def _read_start(event: Event, origin: Origin, ranks: Mapping[str, object]) -> Iterator[_Placing]:
    """The ranks that a job_start names, each with its first GPU."""
    node = f"node:{origin.node}"
    for rank, place in ranks.items():
        if kind_of(rank) == "rank" and isinstance(place, dict):
            stage, gpu = place.get("stage"), place.get("gpu")
            held = (gpu,) if isinstance(gpu, str) and kind_of(gpu) == "gpu" else (node,)
            known = stage if isinstance(stage, str) and kind_of(stage) == "stage" else None
            yield _Placing(rank, event.entity, known, held, node, False)


_COLUMNS = 'rank, job, stage, device, node, epoch_us(since), epoch_us("until"), listed, source, simulated'


def _load(connection: duckdb.DuckDBPyConnection, steps: Sequence[_Step]) -> _Intervals:
    """Open rows that the steps may touch, and those that ended after the first of them."""
    ranks = sorted({p.rank for s in steps for p in s.placed} | {rank for s in steps for rank in s.ended})
    nodes = sorted({s.node for s in steps if s.node})
    jobs = sorted({s.job for s in steps if s.job and not s.ended})
    rows = connection.execute(
        f"""SELECT {_COLUMNS} FROM job_rank
            WHERE ("until" IS NULL OR "until" > make_timestamptz($1))
            AND (rank IN (SELECT unnest($2::VARCHAR[])) OR node IN (SELECT unnest($3::VARCHAR[]))
                 OR job IN (SELECT unnest($4::VARCHAR[]))) ORDER BY since, rank, device""",
        [min(s.time for s in steps), ranks, nodes, jobs],
    ).fetchall()
    known = _Intervals()
    for row in rows:
        stored = _Interval(*row)
        stored.key = (stored.rank, stored.device, stored.since)
        known.add(stored)
    return known


def _save(connection: duckdb.DuckDBPyConnection, changed: Sequence[_Interval]) -> None:
    """Replaces the changed rows; one that would be empty is removed."""
    keys = [row.key for row in changed if row.key is not None]
    if keys:
        columns = {"rank": [k[0] for k in keys], "device": [k[1] for k in keys]}
        with register_columns(connection, "changed_ranks", {**columns, "since": to_timestamps([k[2] for k in keys])}):
            connection.execute(
                "DELETE FROM job_rank USING changed_ranks c "
                "WHERE job_rank.rank = c.rank AND job_rank.device = c.device AND job_rank.since = c.since"
            )
    kept = [row for row in changed if row.until is None or row.until > row.since]
    if kept:
        names = ("rank", "job", "device", "node", "listed", "source", "simulated")
        columns = {name: [getattr(row, name) for row in kept] for name in names}
        columns["stage"] = pa.array([row.stage for row in kept], pa.string())
        columns["since"] = to_timestamps([row.since for row in kept])
        columns["until"] = pa.array([row.until for row in kept], pa.int64()).cast(pa.timestamp("us", "UTC"))
        insert_columns(connection, "job_rank", columns)


def end_unnamed_ranks(connection: duckdb.DuckDBPyConnection, before: int) -> None:
    """Ends listed ranks whose entity no inventory named since `before` (us), at that time; then it is removed."""
    connection.execute(
        """UPDATE job_rank SET "until" = greatest(e.named, job_rank.since) FROM entity e
           WHERE job_rank."until" IS NULL AND e.entity = job_rank.rank AND e.named < make_timestamptz($1)""",
        [before],
    )


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank on a device from `since` to `until` (us; None: it runs). exact: the device is the GPU, not the node."""

    job: str
    rank: str
    stage: str | None
    entity: str
    node: str
    since: int
    until: int | None
    source: str
    simulated: bool

    @property
    def exact(self) -> bool:
        """Whether the GPU of the rank is known; else it ran somewhere on the node."""
        return self.entity != self.node


MOST_MEMBERSHIPS = 200_000
"""Most rows of one answer. Chosen: twice the ranks of a job on all GPUs of a site with 100,000 of them."""


def find_memberships(
    connection: duckdb.DuckDBPyConnection, entities: Collection[str], start: int, end: int, most: int = MOST_MEMBERSHIPS
) -> list[Membership]:
    """Ranks that ran on or as any of `entities` at some time in [start, end] (UTC us), by job and rank.

    entities: GPUs, nodes, ranks, stages and jobs. A GPU also finds ranks of which only its node is known. For a group
    (rack, leaf), pass the nodes and GPUs below it.
    """
    wanted = sorted(entities)
    nodes = sorted({node for e in wanted if (node := _node_of_gpu(e)) is not None})
    rows = connection.execute(
        """SELECT job, rank, stage, device, node, epoch_us(since), epoch_us("until"), source, simulated FROM job_rank
           WHERE since <= make_timestamptz($1) AND ("until" IS NULL OR "until" > make_timestamptz($2))
           AND (device IN (SELECT unnest($3::VARCHAR[])) OR node IN (SELECT unnest($3::VARCHAR[]))
                OR rank IN (SELECT unnest($3::VARCHAR[])) OR job IN (SELECT unnest($3::VARCHAR[]))
                OR stage IN (SELECT unnest($3::VARCHAR[]))
                OR (device = node AND node IN (SELECT unnest($4::VARCHAR[]))))
           ORDER BY job, try_cast(split_part(rank, '.', -1) AS INTEGER), rank, device, since LIMIT $5""",
        [end, start, wanted, nodes, most],
    ).fetchall()
    return [Membership(*row) for row in rows]


def _node_of_gpu(entity: str) -> str | None:
    """The node in the name of a GPU: `node:n042` for `gpu:n042.3`."""
    kind, _, name = entity.partition(":")
    return f"node:{name.rpartition('.')[0]}" if kind == "gpu" and "." in name else None
