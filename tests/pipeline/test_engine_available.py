"""The running engine lists detectors without input signals, until their signals arrive."""

from __future__ import annotations

from typing import Any

from detectors import configured
from detectors.runner import Runner
from pipeline.engine.engine import Engine
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology

STEP = 10 * SECOND
T0 = 1_780_000_000 * SECOND


def test_a_detector_without_data_is_listed_as_off_until_data_arrives_also_after_a_restart(site: Any) -> None:
    def start() -> tuple[Any, Engine, Runner]:
        ingest, runner = site.open(), Runner(configured())
        return (
            ingest,
            Engine(site.database, ingest.devices, Topology(), runner, lambda *_: [], lambda: T0 * 2, STEP),
            runner,
        )

    def off(runner: Runner) -> dict[str, list[str]]:
        return {row["name"]: row["off"] for row in runner.listing() if row["off"]}

    ingest, engine, runner = start()
    assert off(runner) == {}  # nothing was evaluated yet
    for tick in (*range(8), 361, 362):
        site.send("n1", T0 + tick * STEP)
    while (committed := ingest.step()) is not None:
        engine.observe(committed)
    engine.advance(T0 + 8 * STEP)
    assert off(runner) == {}  # it has just started
    engine.advance(T0 + 363 * STEP)
    lacking = off(runner)
    assert lacking["telemetry"] == ["node.load1"]
    assert "gpu.temperature" not in lacking.get("thermal", [])
    assert "xid" not in lacking
    _, _, again = start()
    assert off(again) == lacking
