"""Jobs: what runs where, how fast, and which incidents reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api import impact_models as models
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.api.titles import add_affected
from pipeline.incidents.impact_rows import list_job_incidents, list_jobs, read_pace
from pipeline.incidents.job_pace import SLOWER
from pipeline.incidents.jobs import Pulse
from pipeline.incidents.reach import natural_order
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import WORK, Topology, kind_of

HOUR = 3600 * SECOND
MOST_NODES = 1024
"""Nodes of a job that are listed; node_count has all. Chosen: a job of 8,192 GPUs."""
FRESH = 120 * SECOND
"""Age from which a reading of a rank counts as missing (us). Chosen: longer than most steps."""
_READ = ("step", "step_time", "compute_time")

job_router = APIRouter(prefix="/api/v1")


@job_router.get("/jobs", response_model=models.Jobs)
def jobs(
    request: Request,
    running: bool = False,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    all_nodes: bool = False,
) -> Response:
    """Running jobs and, unless `running`, those that ended; with pace, lost GPU-hours and open incidents. Of a job the
    first 1,024 nodes, or `all_nodes`."""
    service = get_context(request)
    with service.cursor() as cursor:
        found = list_jobs(cursor, None, not running, limit)
    most = None if all_nodes else MOST_NODES
    pulses = service.backend.read_pulses()
    rows = [_bound_nodes(_add_pulse(job, pulses.get(job["job"])), most) for job in found]
    return json_response({"jobs": rows, "as_of": iso(service.now())})


@job_router.get("/jobs/{job}", response_model=models.JobDetail)
def job_detail(request: Request, job: str, hours: Annotated[float, Query(gt=0, le=24 * 30)] = 6.0) -> Response:
    """One job (`job:81` or `81`): its ranks now, its step time of some hours, and the incidents that reached it."""
    service = get_context(request)
    entity = job if job.startswith("job:") else f"job:{job}"
    with service.cursor() as cursor:
        runs = sorted(list_jobs(cursor, entity), key=lambda run: str(run["started"]), reverse=True)
        if not runs:
            raise HTTPException(404, f"job {job!r} is not known")
        history = read_pace(cursor, entity, service.now() - int(hours * HOUR))
        incidents = add_affected(cursor, list_job_incidents(cursor, entity))
    runs[0] = _add_pulse(runs[0], service.backend.read_pulses().get(entity))
    ranks = list_ranks(service, entity) if runs[0]["ended"] is None else []
    more = {"rank_list": ranks, "history": history, "harmed_by": incidents, "as_of": iso(service.now())}
    return json_response({**_bound_nodes(runs[0]), **more, "runs": [_bound_nodes(run) for run in runs[1:]]})


def _bound_nodes(job: Mapping[str, Any], most: int | None = MOST_NODES) -> dict[str, Any]:
    return {**job, "nodes": job["nodes"][:most], "node_count": len(job["nodes"])}


def _add_pulse(job: dict[str, Any], pulse: Pulse | None) -> dict[str, Any]:
    """Returns a running job with its newest step as the evaluation knows it; its row is written once a minute."""
    if pulse is None or job["ended"] is not None:
        return job
    state = "hanging" if pulse.hangs else "running"
    return {**job, "state": state, "last_step": iso(pulse.moved), "last_report": iso(pulse.reported)}


def list_ranks(service: ApiContext, job: str) -> list[dict[str, Any]]:
    """Returns the ranks of a job with their newest readings, in order of their numbers."""
    topology = service.topology_copy.get()
    ranks = sorted((e for e in topology.descendants(job) if kind_of(e) == "rank"), key=natural_order)
    values, times = _read_ranks(service, ranks)
    rows = [_describe_rank(topology, rank, values[:, i].tolist(), int(times[i])) for i, rank in enumerate(ranks)]
    usual = _medians_by_stage(rows)
    for row in rows:
        base, compute = usual.get(row["stage"]), row["compute_time"]
        row["slowdown"] = None if base is None or compute is None else compute / base - 1
        row["suspect"] = row["slowdown"] is not None and row["slowdown"] >= SLOWER
    return rows


def _read_ranks(service: ApiContext, ranks: Sequence[str]) -> tuple[Any, Any]:
    """Returns (readings, ranks) of _READ, NaN where missing or old, and the times of the newest rows, 0 if none."""
    found = service.backend.read_current("rank", _READ)
    place = {name: slot for slot, name in enumerate(list(service.backend.devices.names("rank")))}
    wanted = np.array([place.get(rank, -1) for rank in ranks], np.int64)
    device_of = np.full(len(place) + 1, -1, np.int64)
    device_of[found.slot] = np.arange(len(found.slot))  # the last place takes devices without a slot
    device = np.where(wanted >= 0, device_of[wanted], -1)
    values = np.full((len(_READ), len(ranks)), np.nan)
    times = np.where(device >= 0, found.time[device], 0) if len(found.time) else np.zeros(len(ranks), np.int64)
    fresh = (device >= 0) & (service.now() - times <= FRESH)
    for row, column in enumerate(_READ):
        if column in found.values and len(found.time):
            raw = found.values[column]
            missing = raw == np.iinfo(raw.dtype).max if raw.dtype.kind == "u" else ~np.isfinite(raw)
            read = np.where(missing, np.nan, raw.astype(np.float64))
            values[row] = np.where(fresh, read[device], np.nan)
    return values, times


def _describe_rank(topology: Topology, rank: str, values: Sequence[float], time: int) -> dict[str, Any]:
    step, step_time, compute = (None if value != value else value for value in values)
    devices = [parent for parent in topology.parents.get(rank, ()) if kind_of(parent) not in WORK]
    gpu = next((e for e in devices if kind_of(e) == "gpu"), None)
    return {
        "rank": rank,
        "stage": topology.ancestor_of_kind(rank, "stage"),
        "gpu": gpu,
        "node": next((node for e in devices if (node := topology.ancestor_of_kind(e, "node"))), None),
        "step": None if step is None else int(step),
        "step_time": step_time,
        "compute_time": compute,
        "as_of": iso(time) if time > 0 else None,
    }


def _medians_by_stage(rows: Sequence[Mapping[str, Any]]) -> dict[str | None, float]:
    """Returns the median compute time of each stage with at least three ranks that report one."""
    by_stage: dict[str | None, list[float]] = {}
    for row in rows:
        if row["compute_time"]:
            by_stage.setdefault(row["stage"], []).append(row["compute_time"])
    return {stage: median(found) for stage, found in by_stage.items() if len(found) >= 3}
