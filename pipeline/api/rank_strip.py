"""GET /api/v1/rank-strip: how late each rank of a job computes, over time, as one byte per cell.

A cell is the mean compute time of a rank in an interval over the median of its stage then, less 1. With more
than MAX_ROWS ranks, neighbours share a row, which shows the latest of them. Read from recent rows at low priority.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import duckdb
import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.models import Time
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import Topology, kind_of
from pipeline.store import schema

strip_router = APIRouter(prefix="/api/v1")
MAX_ROWS, MAX_COLUMNS = 512, 180
"""Rows and columns of a strip. Chosen: pixels of a screen; 92 kB."""
LEAST_WIDTH = 10 * SECOND
"""Shortest interval of a column (us). Chosen: ranks are read every 10 s."""
MAX_HOURS = 24.0
"""Longest strip. Chosen: rows are kept as rows for [store] hot_hours, 24 h; older ones are in files."""
LEAST_OF_STAGE = 3
"""Ranks from which a stage has a median to compare with. Chosen: with two it is unknown which is late."""
LOW, STEP = -0.10, 0.002
"""Lateness of level 1, and between two levels: 1 to 251 are -10 % to +40 %."""
TOP, NONE = 251, 0
LATE = 0.03
"""Lateness that counts. Same as in the pace of jobs: twice the daily swing of large runs."""
RECENT_COLUMNS, MAX_SLOW = 5, 20
"""Columns whose median is the lateness now, and ranks listed. Chosen: what a person reads."""
KEPT = 10 * SECOND
Floats = NDArray[np.float64]


class SlowRank(BaseModel):
    """A rank that is late. row: of the strip.  now: lateness of the newest columns.  share: of all columns in which it
    was late."""

    model_config = ConfigDict(extra="forbid")
    rank: str
    row: int
    stage: str | None
    gpu: str | None
    node: str | None
    now: float | None
    mean: float
    share: float


class RankStrip(BaseModel):
    """levels: base64, rows x columns bytes: 0: no value; 1 to 251: lateness from `low` in steps of `step`.

    firsts: number of the first rank of each row, in the order of `ranks`.  labels: name of each row's first rank.
    gpus: GPU of the rank of a row that has only one, else "".  columns begin at `start` and last `width_s` each.
    measured: signal that was compared, null if no rank reported one.  slow: the latest ranks, the latest first.
    """

    model_config = ConfigDict(extra="forbid")
    job: str
    start: Time
    end: Time
    width_s: float
    rows: int
    columns: int
    ranks: int
    first_rank: int
    per_row: int
    labels: list[str]
    gpus: list[str]
    levels: str
    low: float
    step: float
    late: float
    measured: str | None
    late_ranks: int
    slow: list[SlowRank]
    as_of: Time


@dataclass(frozen=True, slots=True)
class Lateness:
    """values: (ranks, columns) lateness, NaN without a value.  signal: the compared signal, None without values."""

    values: Floats
    signal: str | None


@strip_router.get("/rank-strip", response_model=RankStrip)
def rank_strip(
    request: Request,
    job: Annotated[str, Query(min_length=5, max_length=300, pattern="^job:", description="job:NAME")],
    hours: Annotated[float, Query(gt=0, le=MAX_HOURS)] = 1.0,
    first: Annotated[int, Query(ge=0, description="first rank shown")] = 0,
    ranks: Annotated[int | None, Query(ge=1, description="number of ranks shown; all")] = None,
) -> Response:
    """The lateness of all ranks of a job, or of some, over the last hours."""
    service = get_context(request)
    now = service.now()
    key = (now // KEPT, job, hours, first, ranks)
    found = service.remember(f"strip {job}", key, lambda: _build(service, job, hours, first, ranks, now))
    return json_response(found)


def _build(service: ApiContext, job: str, hours: float, first: int, number: int | None, now: int) -> dict[str, Any]:
    topology = service.topology_copy.get()
    every = sorted((e for e in topology.descendants(job) if kind_of(e) == "rank"), key=_natural)
    if not every:
        raise HTTPException(404, f"job {job!r} has no ranks now")
    width = max(LEAST_WIDTH, int(hours * 3600 * SECOND) // MAX_COLUMNS)
    end = now // width * width + width
    columns = max(1, min(MAX_COLUMNS, int(hours * 3600 * SECOND) // width))
    start = end - columns * width
    late = _measure(service, topology, every, start, width, columns)
    shown = slice(min(first, len(every) - 1), None if number is None else first + number)
    names, values = every[shown], late.values[shown]
    per_row = -(-len(names) // MAX_ROWS)
    rows = _merge_rows(values, per_row)
    now_late = _median(values[:, -RECENT_COLUMNS:])
    return {
        "job": job,
        "start": iso(start),
        "end": iso(end),
        "width_s": width / SECOND,
        "rows": len(rows),
        "columns": columns,
        "ranks": len(every),
        "first_rank": shown.start,
        "per_row": per_row,
        "labels": names[::per_row],
        "gpus": [_parent(topology, name, "gpu") or "" for name in names] if per_row == 1 else [],
        "levels": base64.b64encode(encode_levels(rows).tobytes()).decode(),
        "low": LOW,
        "step": STEP,
        "late": LATE,
        "measured": late.signal,
        "late_ranks": int((now_late >= LATE).sum()),
        "slow": _list_slow(topology, names, values, now_late, per_row),
        "as_of": iso(now),
    }


def _measure(
    service: ApiContext, topology: Topology, ranks: Sequence[str], start: int, width: int, columns: int
) -> Lateness:
    stages = topology.group_numbers(ranks, "stage")
    place = {name: i for i, name in enumerate(list(service.backend.devices.names("rank")))}
    slots = np.array([place.get(rank, -1) for rank in ranks], np.int64)

    def read(cursor: duckdb.DuckDBPyConnection) -> Lateness:
        times = _read_times(cursor, "compute_time", ranks, start, width, columns)
        if times is None or not np.isfinite(times).any():
            return Lateness(np.full((len(ranks), columns), np.nan), None)
        return Lateness(compare_with_stage(times, stages), "rank.compute_time")

    if not (slots >= 0).any():
        return Lateness(np.full((len(ranks), columns), np.nan), None)
    return service.reads.run(read)


def _read_times(
    cursor: duckdb.DuckDBPyConnection, column: str, ranks: Sequence[str], start: int, width: int, columns: int
) -> Floats | None:
    """Returns (ranks, columns) means of a column of class rank; None if no table has it."""
    layout = schema.read_layout(cursor, "rank")
    where = f"time >= make_timestamptz({start}) AND time < make_timestamptz({start + columns * width})"
    each = " UNION ALL ".join(
        f'SELECT device, time, "{column}" AS v FROM "{table}" WHERE {where}'
        for table, have in layout.items()
        if column in have
    )
    if not each:
        return None
    found = cursor.execute(
        f"""SELECT r.at, (epoch_us(h.time) - {start}) // {width} AS bucket, avg(h.v)::DOUBLE AS mean
            FROM ({each}) h JOIN device d ON d.id = h.device AND d.class = 'rank'
            JOIN (SELECT unnest($names) AS entity, unnest(range(len($names))) AS at) r ON r.entity = d.entity
            WHERE isfinite(h.v) GROUP BY ALL""",
        {"names": list(ranks)},
    ).fetchnumpy()
    out = np.full((len(ranks), columns), np.nan)
    out[np.asarray(found["at"], np.int64), np.asarray(found["bucket"], np.int64)] = np.asarray(found["mean"], float)
    return out


def compare_with_stage(times: Floats, stages: NDArray[np.int32]) -> Floats:
    """Returns lateness against the median of the stage; of a small stage, against the rank's own median over time."""
    out = np.full(times.shape, np.nan)
    for stage in np.unique(stages):
        mine = stages == stage
        part = times[mine]
        base = _median(part, axis=0) if mine.sum() >= LEAST_OF_STAGE else _median(part)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            out[mine] = np.where(base > 0, part / base - 1, np.nan)
    return out


def _median(values: Floats, axis: int = 1) -> Floats:
    """Returns medians without NaN, NaN where there is no value. Sorting puts NaN last."""
    ordered = np.sort(values, axis=axis)
    count = np.isfinite(ordered).sum(axis=axis)
    low, high = np.maximum(count - 1, 0) // 2, np.maximum(count, 1) // 2
    pick: Callable[[NDArray[Any]], Floats] = lambda at: np.take_along_axis(  # noqa: E731 - used twice
        ordered, np.expand_dims(at, axis), axis
    ).squeeze(axis)
    if not values.shape[axis]:
        return np.full(count.shape, np.nan)
    return np.where(count > 0, 0.5 * (pick(low) + pick(np.minimum(high, values.shape[axis] - 1))), np.nan)


def _merge_rows(values: Floats, per_row: int) -> Floats:
    """Returns the latest of each `per_row` neighbours."""
    if per_row == 1:
        return values
    starts = np.arange(0, len(values), per_row)
    merged: Floats = np.fmax.reduceat(values, starts, axis=0)
    return merged


def encode_levels(lateness: Floats) -> NDArray[np.uint8]:
    """Returns levels: 0 without a value, else 1 to TOP; values beyond the scale get its ends."""
    levels = np.clip(np.rint((np.nan_to_num(lateness) - LOW) / STEP) + 1, 1, TOP)
    return np.where(np.isfinite(lateness), levels, NONE).astype(np.uint8)


def _list_slow(
    topology: Topology, names: Sequence[str], values: Floats, now_late: Floats, per_row: int
) -> list[dict[str, Any]]:
    """Returns the ranks that are late now, or were late for longest."""
    known = np.isfinite(values).sum(axis=1)
    late = (np.nan_to_num(values) >= LATE).sum(axis=1)
    share = late / np.maximum(known, 1)
    mean = np.nan_to_num(values).sum(axis=1) / np.maximum(known, 1)
    score = np.nan_to_num(now_late) + mean
    order = [i for i in np.argsort(-score, kind="stable").tolist() if now_late[i] >= LATE or share[i] >= 0.5]
    return [
        {
            "rank": names[i],
            "row": i // per_row,
            "stage": topology.ancestor_of_kind(names[i], "stage"),
            "gpu": _parent(topology, names[i], "gpu"),
            "node": _parent(topology, names[i], "node"),
            "now": None if np.isnan(now_late[i]) else float(now_late[i]),
            "mean": float(mean[i]),
            "share": float(share[i]),
        }
        for i in order[:MAX_SLOW]
    ]


def _parent(topology: Topology, rank: str, kind: str) -> str | None:
    return topology.ancestor_of_kind(rank, kind)


_DIGITS = re.compile(r"(\d+)")


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Returns a key that sorts rank 9 before rank 10."""
    parts = (part for part in _DIGITS.split(name) if part)
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)
