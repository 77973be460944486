"""The compiled loops of coolant.py: loops are few, so that calls of NumPy cost more than what they reckon."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled
from pipeline.records import SECOND

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
PEERS = 4  # loops below which the median is no witness, and a loop is judged by its own past alone; chosen
LEAST = 1e-3  # of a unit: the logarithm of what stands still; chosen
_LEAST_FLOW = 1.0  # L/min; a loop that runs with less is idle; chosen
_BACK, _WELL = 0.02, 5  # share that a flow may lack, as meters err, and samples for which, until it is back; chosen
_FAST_S, _SLOW_S = 30.0, 120.0  # of the two means of the supply whose difference is its slope; chosen
_RAPID = 0.5  # K/min; ASHRAE TC 9.9 allows 20 K/h, which is 0.33: half as much again, as two moves may meet; chosen
_JUMP_K, _JUMP_K_S = 1.5, 0.1  # K at once, and K/s: litres of coolant warm within minutes, a sensor at once; chosen


@compiled
def together(departure: Floats, groups: NDArray[np.int32]) -> Floats:
    """(K, N) median departure of comparable loops that are measured, of K signals; NaN where fewer than PEERS."""
    shift, room = np.full(departure.shape, np.nan), np.empty(departure.shape[1])
    for k in range(departure.shape[0]):
        for group in range(groups.max() + 1 if len(groups) else 0):
            count = 0
            for i in range(len(groups)):
                if groups[i] == group and math.isfinite(departure[k, i]):
                    room[count] = departure[k, i]
                    count += 1
            if count >= PEERS:
                ranked = np.sort(room[:count])
                middle = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
                for i in range(len(groups)):
                    if groups[i] == group:
                        shift[k, i] = middle
    return shift


@compiled
def collapsed(flow: Floats, expected: Floats, gate: Bools, share: float, time: int, low: Ints, low_since: Ints) -> None:
    """Counts samples in a row with less than a share of the expected flow."""
    for i in range(len(flow)):
        usual = math.exp(-expected[i])
        if math.isfinite(flow[i]) and math.isfinite(usual) and (usual >= _LEAST_FLOW) and gate[i]:
            bad = flow[i] < share * usual
            if bad and ((low[i] == 0) or (low_since[i] > time)):
                low_since[i] = time
            low[i] = low[i] + 1 if bad else 0


@compiled
def held(
    lost: Floats, effect: NDArray[np.float32], delta: float, time: int, large: Ints, well: Ints, back: Bools
) -> None:
    """Since when the flow is down by what matters; whether one that was down is back. lost: ln below the expected."""
    for i in range(len(lost)):
        if not effect[i] >= delta:
            large[i] = 0
        elif (large[i] == 0) or (large[i] > time):  # the clock may have gone back
            large[i] = time
        if math.isfinite(lost[i]):
            well[i] = well[i] + 1 if lost[i] < max(_BACK, effect[i] / 4) else 0
        back[i] = well[i] >= _WELL


@compiled
def slopes(
    supply: Floats, time: int, last: Floats, at: Ints, fast: Floats, slow: Floats, rapid_at: Ints, jumped_at: Ints
) -> None:
    """Notes when the supply rose faster than a set-point, or jumped within one sample."""
    for i in range(len(supply)):
        now = supply[i]
        if not math.isfinite(now):
            continue
        seconds = max((time - at[i]) / SECOND, 0.0)
        step = abs(now - last[i])
        if (at[i] > 0) and (step > _JUMP_K) and (step > _JUMP_K_S * seconds):
            jumped_at[i] = time
        for state, lag in ((fast, _FAST_S), (slow, _SLOW_S)):
            if math.isnan(state[i]):
                state[i] = now
            state[i] += (1 - math.exp(-seconds / lag)) * (now - state[i])
        if (fast[i] - slow[i]) * 60 / (_SLOW_S - _FAST_S) >= _RAPID:
            rapid_at[i] = time
        last[i], at[i] = now, time
