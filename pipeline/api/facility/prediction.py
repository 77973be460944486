"""When the GPUs behind a cooling unit throttle: their margin to the limit that they report, over their warming rate.

Per unit the WATCHED GPUs with the least margin are followed for WINDOW. A straight line is fitted to the temperature of
each; a GPU counts if it warms significantly. The prediction is that of the first GPU to reach its limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.api.facility.units import COOLING
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology, kind_of
from pipeline.store import schema
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

WINDOW, BUCKET = 600 * SECOND, 30 * SECOND
"""Time over which the warming rate is measured, and its points (us). Chosen: coolant answers a lost pump in minutes."""
WATCHED = 12
"""GPUs followed per unit. Chosen: those with the least margin throttle first."""
LEAST_POINTS = 6
"""Points of a line. Chosen: three minutes."""
LEAST_RATE = 0.05
"""Warming that counts (K/min). Chosen: 3 K/h is the weather."""
LEAST_RATIO = 3.0
"""Slope over its standard error from which it is no chance. Chosen: 1 in 700."""
LONGEST = 24 * 60.0
"""Longest prediction (min). Chosen: loads change within a day."""
MAX_AGE = 60 * SECOND
COLUMNS = ("temperature", "thermal_margin", "slowdown_margin")


@dataclass(frozen=True, slots=True)
class Margin:
    """A GPU, its temperature (Cel) and the margin to the limit that it reports (K)."""

    gpu: str
    temperature: float
    left: float


def find_margins(current: CurrentValues, devices: Devices, topology: Topology, now: int) -> dict[str, list[Margin]]:
    """Returns cooling unit -> the GPUs behind it with the least margin; all units with a GPU are named."""
    if "temperature" not in current.values:
        return {}
    nothing = np.full(len(current.time), np.nan)
    temperature, margin, slow = (current.values.get(name, nothing) for name in COLUMNS)
    fresh = (current.slot >= 0) & (now - current.time <= MAX_AGE) & np.isfinite(temperature)
    left = margin - np.nan_to_num(slow)
    names = devices.names("gpu")
    found: dict[str, list[Margin]] = defaultdict(list)
    order = np.argsort(np.where(np.isfinite(left), left, np.inf), kind="stable")
    for i in order[fresh[order]].tolist():
        gpu = names[current.slot[i]]
        for unit in topology.ancestors(gpu):
            if kind_of(unit) in COOLING:
                known = found[unit]
                if len(known) < WATCHED and np.isfinite(left[i]):
                    known.append(Margin(gpu, float(temperature[i]), float(left[i])))
    return dict(found)


def read_temperatures(
    cursor: duckdb.DuckDBPyConnection, gpus: Sequence[str], now: int
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Returns GPU -> (minutes before now, temperature) over WINDOW, means of BUCKET."""
    if not gpus:
        return {}
    layout = schema.read_layout(cursor, "gpu")
    where = f"time >= make_timestamptz({now - WINDOW}) AND time <= make_timestamptz({now})"
    rows = schema.select_hot(cursor, "gpu", layout, ["temperature"], where, gpus)
    query = f"""SELECT entity, (epoch_us(time) - {now}) // {BUCKET} AS bucket, avg(temperature)
                FROM ({rows}) WHERE isfinite(temperature) GROUP BY ALL ORDER BY ALL"""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for entity, bucket, value in cursor.execute(query).fetchall():
        points[entity].append((bucket, value))
    minutes = BUCKET / SECOND / 60
    return {
        gpu: (np.array([b for b, _ in line]) * minutes, np.array([v for _, v in line])) for gpu, line in points.items()
    }


def fit_rate(minutes: NDArray[Any], values: NDArray[Any]) -> tuple[float, float]:
    """Returns slope (K/min) and its standard error of a line through the points; NaN with fewer than LEAST_POINTS."""
    number = len(values)
    if number < LEAST_POINTS:
        return float("nan"), float("nan")
    x, y = minutes - minutes.mean(), values - values.mean()
    square = float((x * x).sum())
    slope = float((x * y).sum()) / square
    rest = y - slope * x
    return slope, float(np.sqrt((rest * rest).sum() / (number - 2) / square))


def predict(margins: Sequence[Margin], lines: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, Any]:
    """Returns the prediction of one unit: minutes, or `reason`, why there is none."""
    nothing = {"minutes": None, "gpu": None, "temperature": None, "left": None, "rate": None, "error": None}
    if not margins:
        return {**nothing, "gpus": 0, "reason": "the GPUs behind it report no limit (gpu.thermal_margin)"}
    nearest = margins[0]
    known = {**nothing, "gpu": nearest.gpu, "temperature": nearest.temperature, "left": nearest.left}
    known["gpus"] = len(margins)
    if nearest.left <= 0:
        return {**known, "minutes": 0.0, "reason": f"{entity_name(nearest.gpu)} is at its limit"}
    found = []
    short = 0
    for margin in margins:
        slope, error = fit_rate(*lines.get(margin.gpu, (np.zeros(0), np.zeros(0))))
        short += not np.isfinite(slope)
        if slope >= LEAST_RATE and slope >= LEAST_RATIO * error:
            found.append((margin.left / slope, margin, slope, error))
    if not found:
        few = f"fewer than {LEAST_POINTS} readings of {int(BUCKET / SECOND)} s in the last 10 min"
        return {**known, "reason": few if short == len(margins) else "its GPUs do not warm"}
    minutes, margin, slope, error = min(found, key=lambda f: f[0])
    if minutes > LONGEST:
        return {**known, "rate": slope, "error": error, "reason": "at this rate not within a day"}
    return {
        "minutes": minutes,
        "gpu": margin.gpu,
        "temperature": margin.temperature,
        "left": margin.left,
        "rate": slope,
        "error": error,
        "gpus": len(margins),
        "reason": "",
    }
