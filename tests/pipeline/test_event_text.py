"""The facts of an event as text: what a person reads in timelines."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.model.event_text import describe_facts

RANKS = {f"rank:81.{i}": {"gpu": f"gpu:n003.{i}", "stage": "stage:81.0"} for i in range(8)}


CANARY = {"canary": "gemm.3", "version": "1", "took": 0.1234, "began": 1_795_835_626_000_000, "uuid": "GPU-1"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, ""),
        ({"xid": 79, "text": "fell off the bus", "pci": ""}, "xid 79, text fell off the bus"),
        ({"seconds": 45.0, "step": 1200}, "45 s, step 1200"),
        ({"ranks": RANKS, "name": "llama"}, "8 ranks, name llama"),
        ({"pids": list(range(9))}, "9 pids"),
        ({"pids": [7, 8]}, "pids 7, 8"),
        ({"from": {"driver": "580"}, "asserted": True}, "from driver 580, asserted yes"),
        (
            {
                "signal": "coolant.flow",
                "share": 0.7,
                "since": 1_795_835_626_000_000,
                "state": "cleared",
                "usual": 328.3286229539167,
                "value": 327.03484319045583,
                "why": "recovered",
            },
            "ended: flow 327 L/min, usual 328.3 L/min; low since 03:13:46Z (recovered)",
        ),
        (
            {
                "signal": "coolant.flow",
                "share": 0.7,
                "since": 1_795_835_626_000_000,
                "state": "active",
                "usual": 328.3286229539167,
                "value": 199.0,
                "others": {"coolant.pressure": 0.37, "other.signal": 0.2},
            },
            "flow 199 L/min, usual 328.3 L/min, limit 229.8 L/min; pressure at 37 % of usual; since 03:13:46Z",
        ),
        (
            {"signal": "coolant.flow", "share": "0.7", "since": 1, "usual": 328.0, "value": 199.0},
            "signal flow, share 0.7, since 1, usual 328 L/min, value 199 L/min",
        ),
        (
            {
                "signal": "gpu.temperature",
                "value": 58.25,
                "rise": 13.0,
                "seconds": 13.0,
                "slope": 1.0,
                "limit": 0.5,
                "since": 1_795_835_626_000_000,
                "state": "active",
            },
            "temperature 58.25 Cel, 13 K in 13 s, limit 0.5 K/s; since 03:13:46Z",
        ),
        ({"took": 0.12, "call": "nvml"}, "took 0.12 s, call nvml"),
        (
            {**CANARY, "digest": "aa", "expected": "aa", "golden": True, "rounds": 360, "runs": 12, "lacking": 2},
            "right result of canary gemm.3, 360 rounds since the last report, "
            "2 problems that the device cannot compute, took 0.123 s",
        ),
        (
            {
                **CANARY,
                "digest": "bb",
                "expected": "aa",
                "golden": False,
                "format": "bf16",
                "range": "large",
                "again": 2,
            }
            | {"wrong": ["a", "b"], "rounds": 1},
            "wrong result (bf16, large) of canary gemm.3, wrong again in 2 retests, 2 problems wrong, took 0.123 s",
        ),
        (
            {**CANARY, "digest": "bb", "expected": "aa", "again": 0},
            "wrong result of canary gemm.3, right in all retests, took 0.123 s",
        ),
        (
            {**CANARY, "digest": "bb", "expected": "aa", "again": 1},
            "wrong result of canary gemm.3, wrong again in 1 retest, took 0.123 s",
        ),
        ({**CANARY, "digest": "bb"}, "result without a known answer of canary gemm.3, took 0.123 s"),
        ({**CANARY, "digest": "died 11", "golden": False}, "the test died 11 of canary gemm.3, took 0.123 s"),
    ],
)
def test_numbers_have_units_and_few_digits_and_long_lists_are_counted(data: dict[str, Any], text: str) -> None:
    assert describe_facts(data) == text


def test_no_more_facts_than_asked_for() -> None:
    assert describe_facts({"a": 1, "b": 2, "c": 3}, 2) == "a 1, b 2, ..."
