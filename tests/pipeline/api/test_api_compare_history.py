"""Comparisons over recent and sealed rows and rollups have the values of single series."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.api.compare import read_comparison
from pipeline.api.history import Span, read_series
from pipeline.model.topology import Topology
from pipeline.store.sealing import HOUR
from tests.pipeline.test_sealing import GPUS, T0, Seal

SIGNALS = ("gpu.power", "gpu.sm_clock", "gpu.energy", "gpu.recovery_action")
HOURS = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Seal]:
    """Six hours of rows each minute; the counter is reset once, a gauge is missing at times."""
    made = Seal(tmp_path)
    number = HOURS * 60 * GPUS
    power = (np.arange(number) % 37).astype("f4")
    power[::5] = np.nan
    rise = np.arange(number, dtype="u8") * 700
    made.add(
        T0,
        HOURS * 60,
        power=power,
        sm_clock=(np.arange(number) % 1900).astype("u2"),
        energy=np.where(np.arange(number) < number // 2, rise, rise - rise[number // 2]),
        generation=np.where(np.arange(number) < number // 2, 5, 6).astype("u4"),
        recovery_action=(np.arange(number) // (GPUS * 30) % 2).astype("u1"),
    )
    yield made
    made.sealer.stop()
    made.database.close()


def compare(store: Seal, points: int) -> dict[str, Any]:
    with store.database.cursor() as cursor:
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        span = Span(T0, T0 + HOURS * HOUR, points)
        found = read_comparison(cursor, Topology(), ["gpu:local.1"], SIGNALS, span, "class")
    return {one["signal"]["name"]: one for one in found["signals"]}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("points", "step"), [(360, 60), (120, 60), (18, 600)])
@pytest.mark.parametrize("sealed", [0, 3, 5])
def test_a_comparison_has_the_values_of_a_series(store: Seal, points: int, step: int, sealed: int) -> None:
    if sealed:
        store.sealer.seal(T0 + sealed * HOUR)
    found = compare(store, points)
    steps = set()
    for name, one in found.items():
        with store.database.cursor() as cursor:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            span = Span(T0, T0 + HOURS * HOUR, points)
            series = read_series(cursor, Topology(), "gpu:local.1", name, span, "class")["points"]
        for key, got in (
            ("value", one["lines"][0]["values"]),
            *((k, one["band"][k]) for k in ("median", "low", "high")),
        ):
            wanted = [point[key] for point in series]
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
        steps.add(one["step"])
    assert (max(steps) == step) is bool(sealed) or points == 360
