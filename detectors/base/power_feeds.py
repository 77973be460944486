"""Which power feeds are dark: no voltage, an open breaker, or no load where there was one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, notes, part
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SIGNALS = ("power.voltage", "power.draw", "power.breaker", "power.state")
_LEARNT = ("power.voltage", "power.draw")
LIVE = 0.1
"""Share of its usual voltage or load below which a feed is dark: EN 50160 calls less than 5 % an interruption, a
meter's error is added; chosen."""
LAPSES = 24 * 3600 * SECOND
"""us after which the last reading of a silent meter no longer counts: it may be gone with its feed. Chosen: work on a
feed is over within a day, or announced again."""
_LEARN = 20  # samples until the usual is known: their median, so that half of them may be outliers
_GAIN = 0.02  # memory of about 50 samples; chosen
_MOST = 2.0  # times the usual, or the least level, that a sample counts as at most: one outlier moves it by 2 %
_LEAST = {"power.voltage": 40.0, "power.draw": 100.0}
"""V and W below which a reading is not a level: telecom's 48 V less 15 %; the draw of a unit's electronics."""
_HIGHEST_V = 50.0  # more is never "no voltage", whatever was learnt: IEC 61140's limit of extra-low voltage
_NEW_LEVEL = {"power.voltage": 3600 * SECOND, "power.draw": LAPSES}
"""us after which another level is the usual one: the learnt one was wrong, or the meter was replaced. Chosen: a dark
feed shows less than the least level; a load is that low for as long as work on a feed takes."""
_STEADY = 0.1  # share of a level within which a reading is at that level; chosen
_OPEN = CATALOGUE["power.breaker"].states.index("tripped")


@dataclass
class UsualLevel(State):
    """Usual voltage or load of each power unit. `signal` decides the limits for a lost and for a new level.

    usual:  median of the first samples, then a slow mean.   count: samples of the first ones.   first: these samples.
    level, since: a level that is next to nothing of the usual one, and since when (us) the unit is at it.
    """

    signal: str
    usual: Floats = memory(np.nan)
    count: Floats = memory(0.0)
    level: Floats = memory(np.nan)
    since: Floats = memory(np.nan)
    first: Floats = memory(np.nan, shape=(_LEARN, N))

    def find_gone(self, values: Floats, time: int) -> Bools:
        """Returns (N,) values that are next to nothing against their usual, which is learnt from the others."""
        size = len(values)
        self.grow(size)
        usual, count, first = self.usual[:size], self.count[:size], self.first[:, :size]
        there = np.isfinite(values)
        early = np.flatnonzero(there & (count < _LEARN))
        if len(early):
            first[count[early].astype(np.intp), early] = values[early]
            count[early] += 1
            usual[early] = np.nanmedian(first[:, early], axis=0)
        limit = np.minimum(LIVE * usual, _HIGHEST_V if self.signal == "power.voltage" else np.inf)
        known = there & (count >= _LEARN)
        known[early] = False
        gone = np.asarray(known & (values < limit))
        self._follow_new_level(values, gone, time)
        learn = known & ~gone
        clipped = np.minimum(values[learn], _MOST * np.maximum(usual[learn], _LEAST[self.signal]))
        usual[learn] += _GAIN * (clipped - usual[learn])
        return gone

    def _follow_new_level(self, values: Floats, gone: Bools, time: int) -> None:
        """Makes a level that a unit has had for long its usual one, and removes the unit from `gone`."""
        level, since = self.level[: len(values)], self.since[: len(values)]
        level[np.isfinite(values) & ~gone] = np.nan
        off = gone & (values >= _LEAST[self.signal])
        if not off.any():
            return
        moved = off & ~((np.abs(values - level) <= _STEADY * level) & (since <= time))
        level[moved], since[moved] = values[moved], time
        settled = off & (time - since > _NEW_LEVEL[self.signal])
        self.usual[: len(values)][settled], level[settled] = values[settled], np.nan
        gone &= ~settled


@dataclass
class PowerFeeds(State):
    """Which power units have no power, and since when.

    dark: entity -> since, looks, why, seen: units without power when they were last measured.
    """

    dark: dict[str, dict[str, Any]] = notes()
    _usual: dict[str, UsualLevel] = part(lambda: {name: UsualLevel(name) for name in _LEARNT})

    def update(self, frame: Frame | None, time: int) -> None:
        """Adds the frame of class power; None if there is none at this instant."""
        if self.dark:
            self._drop_unmeasured(time)
        if frame is None or not frame.values:
            return
        size = len(frame.entities)
        columns = {name: frame[name] if name in frame.values else np.full(size, np.nan) for name in SIGNALS}
        gone = {name: self._usual[name].find_gone(columns[name], time) for name in _LEARNT}
        measured = ~np.isnan(np.stack(list(columns.values()))).all(axis=0)
        tripped = columns["power.breaker"] == _OPEN
        off = tripped | gone["power.voltage"] | (gone["power.draw"] & np.isnan(columns["power.voltage"]))
        if self.dark:
            for i in np.flatnonzero(measured & ~off).tolist():
                self.dark.pop(frame.entities[i], None)
        for i in np.flatnonzero(off).tolist():
            entity = frame.entities[i]
            volts, watts = (float(columns[name][i]) for name in _LEARNT)
            why = "a tripped breaker" if tripped[i] else _why(volts, watts, *(bool(gone[n][i]) for n in _LEARNT))
            known = self.dark.setdefault(entity, {"since": frame.time, "looks": 0, "why": why})
            known["looks"] += 1
            known["why"], known["seen"] = why, frame.time

    def _drop_unmeasured(self, time: int) -> None:
        """Removes units that were not measured for long."""
        for entity, known in list(self.dark.items()):
            known["seen"] = min(known.get("seen", time), time)  # the clock may have been set back
            if time - known["seen"] > LAPSES:
                del self.dark[entity]


def _why(volts: float, watts: float, dead: bool, idle: bool) -> str:
    """Returns in words what shows that there is no power. dead, idle: whether voltage and load are gone."""
    if dead:
        return f"no voltage ({volts:.0f} V){', no load' if idle else ''}"
    return f"no load ({watts:.0f} W); its voltage was not read"
