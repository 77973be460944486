"""Whether slow ranks are worth a page: what proves it, for how long it must last, and who merely lost a lead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.streams import Bools, Floats, Step, Streams
from detectors.straggler.blame import Suspicion
from detectors.straggler.causes import Cause, Causes
from detectors.straggler.places import Places
from detectors.straggler.started import Started
from pipeline.records import SECOND, Level


class Kept(Protocol):
    """Settings of the detector `straggler`, and what it keeps by slot."""

    delta: float
    hold: float
    start_hold: float
    peers: int
    places: Places
    causes: Causes
    started: Started
    streams: Streams
    recent: NDArray[Any]
    above: NDArray[np.int64]
    behind: NDArray[np.int64]
    lagged: NDArray[np.int64]
    newest: Floats
    usual: Floats


def level_of(
    of: Kept, suspicion: Suspicion, seen: Sequence[Cause], late: Bools, doubt: Bools, time: int, step: Step
) -> Level:
    """Page with a physical cause at once, else after the hold and only among enough peers.

    What a power cap that comes or goes may explain is no page: neither clocks nor sums say more by then. Nor is who
    was quicker than its stage and is no slower than the others now: nobody waits for it. late: (slots,) from lags();
    doubt: (S,) what their sums say may be of a cap.
    """
    slots = np.array(suspicion.slots)
    if not late.any():
        return "suspect"
    if doubt[slots].all():
        return "page" if any(cause.physical and cause.signal != "gpu.sm_clock" for cause in seen) else "suspect"
    if any(of.causes.proves(cause, slots) for cause in seen):
        return "page"
    on = slots[step.on[slots]]
    held = [s for s in on.tolist() if of.above[s] and np.median(of.recent["own"][s]) >= of.delta / 2]
    if not held or (suspicion.unsure and not seen):
        return "suspect"
    if np.median(of.newest[held] - of.usual[held]) < of.delta / 2:
        return "suspect"  # its newest steps are as they should be: who comes now would find nothing
    since = float(np.median(of.above[held]))  # one of a node may have paused before
    enough = bool(seen) or int(step.size[held].max()) >= of.peers
    return "page" if enough and time - since >= of.hold * SECOND else "suspect"


def lags(of: Kept, slots: NDArray[np.intp], step: Step, time: int) -> tuple[Bools, list[int]]:
    """(slots,) who is slower than its stage now; and those that have not been for the hold: that is their usual."""
    departs = of.streams.cells[kernel.BASELINE, slots] + step.effect[slots]
    late = np.minimum(departs, np.median(of.recent["stage"][slots], axis=1)) >= of.delta / 2
    late |= (of.behind[slots] > 0) | ~of.places.by_stage[slots]
    of.lagged[slots[late]] = time
    since = np.maximum(of.above[slots], of.lagged[slots])
    over = ~late & (of.above[slots] > 0) & (time - since >= of.hold * SECOND)
    return np.asarray(late), slots[over].tolist()


def since_start(of: Kept, suspicion: Suspicion, seen: Sequence[Cause], time: int) -> tuple[Level, list[Cause]]:
    """Of those that are a suspect otherwise: how urgent it is that they have been slow since their first sample.

    That their stage had not learnt before does not matter here: its present times are what they are compared with.
    """
    slots, told = list(suspicion.slots), list(seen)
    since = of.started.since(slots, of.behind)
    if since is None or time - since < of.hold * SECOND:
        return "suspect", told
    found = of.started.causes(slots, of.causes.capped, of.places)
    if not found[0].physical and of.started.by_design(slots, of.behind, of.places):
        return "suspect", told
    if time - since >= of.start_hold * SECOND:
        of.started.note(slots, of.places, time)
    elif not found[0].physical:
        return "suspect", told
    return "page" if found[0].physical else "ticket", [*told, *found]
