"""Answers about jobs for tests: a slow one with a late rank, a hanging one, and others; and a strip of any size."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW

HOSTILE = '<b>llama</b> "Ω" 節'


def ago(seconds: int) -> str:
    """Returns a time before NOW as in the API."""
    return iso(NOW - seconds * SECOND)


def job(identity: str, **changes: Any) -> dict[str, Any]:
    """Returns one run."""
    return {
        "job": f"job:{identity}",
        "name": "pretrain-70b",
        "account": "research",
        "user": "ada",
        "scheduler": "slurm",
        "state": "running",
        "started": ago(86_400),
        "ended": None,
        "ranks": 512,
        "gpus": 512,
        "nodes": ["n003", "n004"],
        "node_count": 64,
        "simulated": True,
        "step_time": 2.12,
        "usual_step_time": 2.1,
        "slowdown": 0.01,
        "last_step": ago(3),
        "last_report": ago(3),
        "checkpoint": ago(1800),
        "lost_gpu_hours": 0.0,
        "lost_gpu_hours_per_hour": 0.0,
        "incidents": [],
        **changes,
    }


def jobs() -> list[dict[str, Any]]:
    """Returns one job of each state."""
    slow = {"step_time": 2.78, "slowdown": 0.31, "lost_gpu_hours": 210.4, "lost_gpu_hours_per_hour": 121.2}
    return [
        job("80"),
        job("81", **slow, incidents=["A1"]),
        job("82", state="hanging", last_step=ago(400), gpus=16, ranks=16, node_count=2, name=HOSTILE),
        job("83", step_time=None, usual_step_time=None, slowdown=None, gpus=8),
        job("79", state="ended", ended=ago(7200), slowdown=None),
    ]


def harm(**changes: Any) -> dict[str, Any]:
    """Returns an incident that reached a job."""
    return {
        "id": "A1",
        "detector": "straggler",
        "summary": "GPU 7 of sim-n010: thermal throttle, rank 79 is 31 % slow",
        "severity": "page",
        "onset": ago(6200),
        "resolved": None,
        "state": "slow",
        "slowdown": 0.31,
        "basis": "step time",
        "lost_gpu_hours": 210.4,
        "lost_gpu_hours_per_hour": 121.2,
        **changes,
    }


def job_detail(**changes: Any) -> dict[str, Any]:
    """Returns GET /api/v1/jobs/81."""
    history = [{"time": ago(60 * (60 - i)), "step_time": 2.1 if i < 30 else 2.78, "steps": 28.0} for i in range(60)]
    old = harm(id="B2", severity="ticket", resolved=ago(40_000), onset=ago(50_000), slowdown=None, state="unknown")
    return {
        **jobs()[1],
        "rank_list": [],
        "history": history,
        "harmed_by": [harm(), old],
        "runs": [job("81", state="ended", started=ago(200_000), ended=ago(90_000))],
        "as_of": iso(NOW),
        **changes,
    }


def strip_table(
    ranks: int = 64, rows: int | None = None, columns: int = 180, late: int = 17, **changes: Any
) -> dict[str, Any]:
    """Returns GET /api/v1/rank-strip; one row becomes late after two thirds."""
    shown = rows or min(ranks, 512)
    levels = np.random.default_rng(1).normal(51, 2, (shown, columns)).round().clip(1, 251).astype(np.uint8)
    levels[late % shown, columns * 2 // 3 :] = 206
    levels[(late + 9) % shown, columns // 3 : columns // 2] = 0
    per_row = -(-ranks // shown)
    slow: dict[str, Any] = {"rank": f"rank:81.{late}", "stage": "stage:81.0", "gpu": "gpu:n003.1", "node": "node:n003"}
    slow["row"] = late // per_row
    return {
        "job": "job:81",
        "start": ago(3600),
        "end": iso(NOW),
        "width_s": 3600 / columns,
        "rows": shown,
        "columns": columns,
        "ranks": ranks,
        "first_rank": 0,
        "per_row": per_row,
        "labels": [f"rank:81.{i * per_row}" for i in range(shown)],
        "gpus": [f"gpu:n{i // 8:03}.{i % 8}" for i in range(shown)] if per_row == 1 else [],
        "levels": base64.b64encode(levels.tobytes()).decode(),
        "low": -0.1,
        "step": 0.002,
        "late": 0.03,
        "measured": "rank.compute_time",
        "late_ranks": 1,
        "slow": [{**slow, "now": 0.31, "mean": 0.1, "share": 0.33}],
        "as_of": iso(NOW),
        **changes,
    }


def jobs_table(found: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Returns GET /api/v1/jobs."""
    return {"jobs": jobs() if found is None else found, "as_of": iso(NOW)}


def answers(ranks: int = 64) -> dict[str, Any]:
    """Returns the answers by path."""
    return {"jobs": jobs_table(), "jobs/job:81": job_detail(), "rank-strip": strip_table(ranks)}
