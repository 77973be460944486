"""When the GPUs behind a cooling unit throttle: their margin to the limit that they report, over their warming rate.

Per unit the WATCHED GPUs with the least margin are followed for WINDOW. Straight lines are fitted to what their
temperatures have in common, over WINDOW and over RECENT: what a single GPU does is not the unit's. The prediction is
that of the first GPU to reach its limit at this rate, of those that warm themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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

WINDOW, BUCKET = 600 * SECOND, 10 * SECOND
"""Time over which the warming rate is measured, and its points (us). Chosen: what answers slowly, such as air, and
twice the interval of gpu.temperature."""
RECENT = 120 * SECOND
"""Time over which fast warming is measured, and whether slow warming goes on (us). Chosen: GPUs warm within half a
minute after their pump stops, and are as warm as they get two minutes later."""
WATCHED = 12
"""GPUs followed per unit. Chosen: those with the least margin throttle first."""
LEAST_POINTS, LEAST_SPAN = 6, 3.0
"""Points of a line, and the time over which they are spread if it is that of WINDOW (min). Chosen."""
LEAST_RATE = 0.1
"""Warming that counts (K/min). Chosen: over WINDOW, what sensors resolve, 1 K; 3 K/h is the weather."""
LEAST_HOT = 4
"""The unit throttles if one in so many watched GPUs is at its limit; fewer have a fault of their own. Chosen."""
LEAST_RATIO = 3.0
"""Slope over its standard error from which it is no chance. Chosen: 1 in 700."""
FAST_RATE, FAST_RATIO = 1.5, 4.0
"""The same of warming over RECENT, which has fewer points (K/min, 1). Chosen: 1 in 700 by Student's t with 10 degrees
of freedom; a rate above that of GPUs that are watched because they are the warmest now."""
SETTLED = 3
"""Newest points whose mean must lie above all those before RECENT, for fast warming: GPUs that cooled for a checkpoint
become as warm as they were. Chosen: the mean of three has little noise."""
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


def warming_rate(minutes: NDArray[Any], values: NDArray[Any]) -> tuple[float, float, float]:
    """Returns (K/min, standard error, s) of a line that rises significantly, also now, and the time that it is through;
    else 0 K/min, or NaN with too few points.

    minutes: before now, negative.  What only returns to a temperature of before RECENT, as after a checkpoint, is no
    fast warming.  After a step the line over WINDOW still rises when the temperature no longer does: it counts only if
    the line over RECENT has half of its slope, within its standard error.
    """
    late = minutes >= -RECENT / SECOND / 60
    now, now_error = fit_rate(minutes[late], values[late])
    before = values[~late]
    returns = len(before) >= LEAST_POINTS and values[late][-SETTLED:].mean() <= before.max()
    if now >= FAST_RATE and now >= FAST_RATIO * now_error and not returns:
        return now, now_error, RECENT / SECOND
    slope, error = fit_rate(minutes, values)
    if not np.isfinite(slope) or np.ptp(minutes) < LEAST_SPAN:
        return float("nan"), float("nan"), 0.0
    goes_on = not np.isfinite(now) or now >= slope / 2 - now_error
    rises = slope >= LEAST_RATE and slope >= LEAST_RATIO * error and goes_on
    return slope if rises else 0.0, error, WINDOW / SECOND


def _warms_along(line: tuple[NDArray[Any], NDArray[Any]], rate: float, over: float) -> bool:
    """Returns whether a GPU warms at half of the rate of all, or faster: one that is hot by its own fault need not."""
    minutes, values = line
    late = minutes >= -over / 60
    return fit_rate(minutes[late], values[late])[0] >= rate / 2


def common_line(lines: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the times of all lines, and there the median of their distances from their own mean: one GPU that
    begins to work does not move it."""
    sums: dict[float, list[float]] = defaultdict(list)
    for minutes, values in lines:
        for minute, value in zip(minutes.tolist(), (values - values.mean()).tolist(), strict=True):
            sums[minute].append(value)
    times = sorted(sums)
    return np.array(times), np.array([np.median(sums[time]) for time in times])


def predict(margins: Sequence[Margin], lines: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, Any]:
    """Returns the prediction of one unit: minutes, or `reason`, why there is none."""
    names = ("minutes", "gpu", "temperature", "left", "rate", "error", "over_s")
    nothing: dict[str, Any] = dict.fromkeys(names)
    if not margins:
        return {**nothing, "gpus": 0, "reason": "the GPUs behind it report no limit (gpu.thermal_margin)"}
    nearest = margins[0]
    known = {**nothing, "gpu": nearest.gpu, "temperature": nearest.temperature, "left": nearest.left}
    known["gpus"] = len(margins)
    hot = sum(m.left <= 0 for m in margins)
    if hot >= max(1, len(margins) // LEAST_HOT):
        return {**known, "minutes": 0.0, "reason": f"{entity_name(nearest.gpu)} is at its limit"}
    slope, error, over = warming_rate(*common_line([lines[m.gpu] for m in margins if m.gpu in lines]))
    if not np.isfinite(slope):
        few = f"fewer than {LEAST_POINTS} readings over {LEAST_SPAN:g} min in the last 10 min"
        return {**known, "reason": few}
    if slope <= 0:
        return {**known, "reason": "its GPUs do not warm"}
    cool = [m for m in margins if m.left > 0]
    first = next((m for m in cool if m.gpu in lines and _warms_along(lines[m.gpu], slope, over)), cool[0])
    minutes, known = first.left / slope, {**known, **asdict(first)}
    if minutes > LONGEST:
        return {**known, "rate": slope, "error": error, "over_s": over, "reason": "at this rate not within a day"}
    return {**known, "minutes": minutes, "rate": slope, "error": error, "over_s": over, "reason": ""}
