"""The facts of an event as text: what a person reads in timelines."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.model.event_text import describe_facts

RANKS = {f"rank:81.{i}": {"gpu": f"gpu:n003.{i}", "stage": "stage:81.0"} for i in range(8)}


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
            "signal flow, share 70 %, since 2026-11-28T03:13:46Z, state cleared, usual 328.3 L/min, value 327 L/min, "
            "why recovered",
        ),
    ],
)
def test_numbers_have_units_and_few_digits_and_long_lists_are_counted(data: dict[str, Any], text: str) -> None:
    assert describe_facts(data) == text


def test_no_more_facts_than_asked_for() -> None:
    assert describe_facts({"a": 1, "b": 2, "c": 3}, 2) == "a 1, b 2, ..."
