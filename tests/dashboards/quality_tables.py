"""Answers of GET /api/v1/quality for tests: a rack of silent agents, failing sources, losses; and an empty site."""

from __future__ import annotations

from typing import Any

from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW

HOSTILE = '<b>x</b> "&amp;" Ω 節'
BLIND_GPU = {
    "detectors": ["straggler", "thermal"],
    "signals": ["gpu.power", "gpu.temperature"],
    "devices": {"gpu": 144},
}


def ago(seconds: int) -> str:
    """Returns a time before NOW as in the API."""
    return iso(NOW - seconds * SECOND)


def problem(identity: str, kind: str, state: str, **changes: Any) -> dict[str, Any]:
    """Returns a row of sources that do not report."""
    return {
        "id": identity,
        "kind": kind,
        "part": "",
        "state": state,
        "reason": "",
        "count": 1,
        "nodes": 1,
        "racks": 1,
        "shared": "",
        "since": ago(720),
        "until": ago(720),
        "expected": False,
        "examples": [f"{kind}:n003"],
        "incidents": [],
        "blinds": {"detectors": [], "signals": [], "devices": {}},
        **changes,
    }


def problems() -> list[dict[str, Any]]:
    """Returns one row of each kind."""
    rack = [f"agent:n{i:03}" for i in range(12)]
    dcgm = "Get http://127.0.0.1:9400/metrics: connection refused"
    denied = "open /dev/kmsg: Operation not permitted"
    return [
        problem(
            "aa01",
            "agent",
            "silent",
            count=18,
            nodes=18,
            shared="rack:r12",
            examples=rack,
            incidents=["A1"],
            blinds=BLIND_GPU,
            until=ago(700),
        ),
        problem("aa02", "agent", "rejected", reason="rules: bounds", examples=["agent:n777"]),
        problem("aa03", "clock", "behind", reason="8 s", examples=["node:n200"]),
        problem(
            "aa04",
            "bmc",
            "does not respond",
            reason="certificate verify failed",
            count=3,
            examples=["bmc:n1", "bmc:n2", "bmc:n3"],
        ),
        problem("aa05", "exporter", "does not respond", reason=dcgm, examples=[f"exporter:{HOSTILE}"]),
        problem(
            "aa06", "collector", "hung", part="nvml", reason=HOSTILE, examples=["collector:n042.nvml"], blinds=BLIND_GPU
        ),
        problem("aa07", "collector", "no data", part="kernel_log", reason=denied, count=64, nodes=64, expected=True),
    ]


def loss(cause: str, **changes: Any) -> dict[str, Any]:
    """Returns a row of lost messages."""
    return {
        "cause": cause,
        "topic": "telemetry.v1",
        "senders": 1,
        "messages": 120,
        "last_day": 40,
        "first": ago(86_400 * 3),
        "last": ago(7200),
        "examples": ["n003"],
        **changes,
    }


def sight(name: str, kind: str, devices: int, blind: int, missing: str = "", **changes: Any) -> dict[str, Any]:
    """Returns a detector with the devices that it cannot judge."""
    own = {"detector": name, "kind": kind, "devices": devices, "blind": blind, "missing": missing}
    return {**own, "off": [], "errors": 0, **changes}


def quality_table(**changes: Any) -> dict[str, Any]:
    """Returns GET /api/v1/quality of a site with problems."""
    rejected = {"rule": "bounds", "topic": "telemetry.v1", "sender": "n777", "messages": 9, "first": ago(900)}
    return {
        "as_of": iso(NOW),
        "agents": {
            "known": 64,
            "reporting": 45,
            "silent": 19,
            "age_p50": 4.1,
            "age_p99": 9.5,
            "age_worst": 31.0,
            "worst": "node:n031",
        },
        "backlog": {
            "watermark": ago(40),
            "backlog": False,
            "lag_s": 4.0,
            "stalled": False,
            "unready": [],
            "unsent": 2400,
            "agents": 2,
            "examples": ["agent:n005", "agent:n006"],
        },
        "problems": problems(),
        "more": 0,
        "detectors": [
            sight("straggler", "rank", 512, 144, "rank.compute_time"),
            sight("thermal", "gpu", 512, 152, "gpu.power"),
            sight("coolant", "cdu", 0, 0, off=["coolant.flow"]),
            sight("xid", "gpu", 512, 0, errors=3),
            sight("memory", "gpu", 512, 0),
        ],
        "gaps": [loss("spool full", senders=7), loss(f"lost before it was stored {HOSTILE}", last_day=0)],
        "gap_hours": [0] * 20 + [4, 30, 6, 0],
        "late": {"gpu": 320},
        "rejected": [
            {**rejected, "last": ago(30), "reason": f"gpu.power of gpu:n777.0 is 1e9; expected at most 3000 {HOSTILE}"}
        ],
        "rejected_total": {"bounds": 220},
        "earlier": [],
        "versions": [
            {"name": "agent", "version": "1.4.0", "nodes": 60, "examples": ["node:n001"]},
            {
                "name": "agent",
                "version": "1.3.2",
                "nodes": 4,
                "examples": ["node:n050", "node:n051", "node:n052", "node:n053"],
            },
            {"name": "nvidia_driver", "version": "580.95.05", "nodes": 64, "examples": ["node:n001"]},
        ],
        "lags": [
            {"topic": "events.v1", "messages": 12, "p50": 0.82, "p99": 2.31, "longest": 2.4},
            {"topic": "telemetry.v1", "messages": 3840, "p50": 5.6, "p99": 74.0, "longest": 131.0},
        ],
        "lag_window_s": 300.0,
        "duplicates": 17,
        "disk": {
            "free": 412_000_000_000,
            "total": 960_000_000_000,
            "minimum": 268_435_456,
            "per_day": None,
            "full_s": None,
        },
        **changes,
    }


def empty_quality() -> dict[str, Any]:
    """Returns GET /api/v1/quality of a site without agents."""
    nobody = {"age_p50": None, "age_p99": None, "age_worst": None, "worst": ""}
    waiting = {"watermark": None, "backlog": False, "lag_s": None, "stalled": False, "unready": []}
    return quality_table(
        agents={"known": 0, "reporting": 0, "silent": 0, **nobody},
        backlog={**waiting, "unsent": 0, "agents": 0, "examples": []},
        problems=[],
        detectors=[],
        gaps=[],
        gap_hours=[0] * 24,
        late={},
        rejected=[],
        rejected_total={},
        versions=[],
    )


def members_table(total: int) -> dict[str, Any]:
    """Returns the first page of the sources of a row."""
    member = {"rack": "rack:r12", "since": ago(720), "reason": HOSTILE}
    return {
        "id": "aa01",
        "total": total,
        "members": [{"entity": f"agent:n{i:03}", "node": f"node:n{i:03}", **member} for i in range(min(total, 100))],
    }


def receivers_table() -> dict[str, Any]:
    """Returns GET /api/v1/receivers."""
    own = {"receiver": "ops", "kind": "webhook", "since": None, "held": 0, "silences": 0}
    return {
        "receivers": [
            {**own, "name": "ops", "state": "ok", "answer": "200", "delivered": ago(300), "pending": 0, "dead": 0},
            {
                **own,
                "name": HOSTILE,
                "state": "down",
                "answer": "timed out",
                "delivered": None,
                "pending": 4,
                "dead": 2,
            },
        ]
    }
