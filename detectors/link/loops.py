"""What is done for every port or lane at every tick, compiled: one pass over state that hardly ever changes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@compiled
def unmoved(now: Floats, last: Floats, gone: Ints) -> bool:
    """Whether each reads as it did, and what was missing still is."""
    for i in range(len(now)):
        if now[i] == last[i]:
            if gone[i] != 0:
                return False
        elif now[i] == now[i] or gone[i] == 0:
            return False
    return True


@compiled
def best_step(
    values: Floats,
    judged: Bools,
    levels: tuple[Floats, Floats],
    counts: NDArray[np.int32],
    times: Ints,
    time: int,
    limits: tuple[int, int],
) -> None:
    """One sample of each device's link. levels: best, newest. limits: samples that confirm, and the top of counts."""
    (best, newest), (confirm, top) = levels, limits
    for i in range(len(values)):
        value = values[i]
        if not np.isfinite(value):
            continue
        times[1, i] = time
        if not (judged[i] or value >= best[i]):
            continue
        counts[0, i] = min(counts[0, i] + 1, top) if value == newest[i] else 1
        newest[i] = value
        if value > best[i] and counts[0, i] >= confirm:
            best[i] = value
        if value < best[i]:
            if counts[1, i] == 0:
                times[0, i] = time
            counts[1, i] = min(counts[1, i] + 1, top)
        else:
            counts[1, i] = 0
            times[2, i] = time
        counts[2, i] = min(counts[2, i] + 1, top)
        if judged[i]:
            counts[3, i] = min(counts[3, i] + 1, top)


@compiled
def idle_since(load: Floats, busy: float, idle: Ints, time: int) -> None:
    """Since when each device has been idle; 0: it is at work. Who does not tell stays as it was."""
    for i in range(len(load)):
        if load[i] < busy:
            if idle[i] == 0:
                idle[i] = time
        elif np.isfinite(load[i]):
            idle[i] = 0


@compiled
def bytes_step(
    total: Floats,
    up: Bools,
    read: tuple[Floats, Ints],
    still: tuple[Ints, Ints],
    failing: tuple[Floats, Ints],
    time: int,
) -> None:
    """One reading of what each port has moved. read: last total and when. still: since when, and readings it moved in.

    Who moves again after it stood begins to be known anew; a port that is down does not stall.
    """
    (last, seen), (since, moves), (failed, failures) = read, still, failing
    for i in range(len(total)):
        if np.isfinite(total[i]):
            if total[i] == last[i]:
                if since[i] == 0:
                    since[i] = seen[i]
            else:
                moves[i] = 1 if since[i] > 0 else moves[i] + 1
                since[i], failed[i], failures[i] = 0, 0.0, 0
                last[i] = total[i]
            seen[i] = time
        if not up[i]:
            since[i] = 0


@compiled
def lanes_step(
    state: Floats,
    speed: Floats,
    links: NDArray[np.void],
    time: int,
    limits: tuple[int, int, float],
) -> None:
    """One sample of each NVLink. limits: samples that confirm, the top of counts, and the least share of its best."""
    confirm, top, least = limits
    for i in range(len(state)):
        link = links[i]
        told, fast = np.isfinite(state[i]), np.isfinite(speed[i])
        up = told and state[i] != 0
        if fast:
            link.held = min(link.held + 1, top) if np.float32(speed[i]) == link.newest else 1
            link.newest = speed[i]
            if link.held >= confirm and speed[i] > link.best:
                link.best = speed[i]
        low = (told and not up and link.was_up) or (fast and speed[i] < least * link.best)
        if low:
            if link.low == 0:
                link.since = time
            link.low = min(link.low + 1, top)
        elif told or fast:
            link.low = 0
        if up:
            link.was_up = True
        if told or fast:
            link.count = min(link.count + 1, top)
