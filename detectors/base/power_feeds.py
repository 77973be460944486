"""Which power feeds are dark: no voltage, an open breaker, or no load where there was one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE

SIGNALS = ("power.voltage", "power.draw", "power.breaker", "power.state")
_LEARNT = ("power.voltage", "power.draw")
LIVE = 0.1
"""Share of its usual voltage or load below which a feed is dark: EN 50160 calls less than 5 % an interruption, a
meter's error is added; chosen."""
LAPSES = 24 * 3600 * SECOND
"""What a meter told that is silent for so long is not known any more: it may be gone with its feed; chosen: work on a
feed is over within a day, or announced anew."""
_LEARN = 20  # samples until the usual is known: their median, so that half of them may be absurd
_GAIN = 0.02  # memory of about 50 samples; chosen
_MOST = 2.0  # times the usual, or the least level, that a sample counts as at most: one absurd value moves it by 2 %
_LEAST = {"power.voltage": 40.0, "power.draw": 100.0}
"""V and W below which nothing is a level of its own: telecom's 48 V less 15 %; what a unit's own electronics draw."""
_HIGHEST_V = 50.0  # nobody calls more than that no voltage, whatever was learnt: IEC 61140's limit of extra-low voltage
_ANEW = {"power.voltage": 3600 * SECOND, "power.draw": LAPSES}
"""Who stands at another level for so long has that one: what was learnt was wrong, or the meter is another. Chosen: a
dark feed shows less than the least level; a load is that low for as long as work on a feed takes."""
_STEADY = 0.1  # of a level within which it is that level; chosen
_USUAL, _COUNT, _LEVEL, _SINCE, _ROWS = 0, 1, 2, 3, 4  # rows of what is kept of each unit; its first samples follow
_OPEN = CATALOGUE["power.breaker"].states.index("tripped")


class PowerFeeds:
    """Usual voltage and load of each unit, and since when it has been dark; plain data, a few units per row."""

    def __init__(self) -> None:
        self._usual = {name: _fresh(0) for name in _LEARNT}  # by position: _USUAL and so on
        self.dark: dict[str, dict[str, Any]] = {}
        """Entity -> since, looks, why, seen: those that had no power when they were looked at last."""

    def update(self, frame: Frame | None, time: int) -> None:
        """Takes the frame of class power, None if there is none at this instant."""
        if self.dark:
            self._lapse(time)
        if frame is None or not frame.values:
            return
        size = len(frame.entities)
        columns = {name: frame[name] if name in frame.values else np.full(size, np.nan) for name in SIGNALS}
        gone = {name: self._gone(name, columns[name], time) for name in _LEARNT}
        spoke = ~np.isnan(np.stack(list(columns.values()))).all(axis=0)
        tripped = columns["power.breaker"] == _OPEN
        off = tripped | gone["power.voltage"] | (gone["power.draw"] & np.isnan(columns["power.voltage"]))
        if self.dark:
            self._lit([frame.entities[i] for i in np.flatnonzero(spoke & ~off).tolist()])
        for i in np.flatnonzero(off).tolist():
            entity = frame.entities[i]
            volts, watts = (float(columns[name][i]) for name in _LEARNT)
            why = "a tripped breaker" if tripped[i] else _why(volts, watts, *(bool(gone[n][i]) for n in _LEARNT))
            known = self.dark.setdefault(entity, {"since": frame.time, "looks": 0, "why": why})
            known["looks"] += 1
            known["why"], known["seen"] = why, frame.time

    def _lit(self, entities: Iterable[str]) -> None:
        """Forgets those that have power."""
        for entity in entities:
            self.dark.pop(entity, None)

    def _lapse(self, time: int) -> None:
        """Forgets what was not measured for long."""
        for entity, known in list(self.dark.items()):
            known["seen"] = min(known.get("seen", time), time)  # a time that stepped back is no future
            if time - known["seen"] > LAPSES:
                del self.dark[entity]

    def _gone(self, name: str, values: NDArray[np.float64], time: int) -> NDArray[np.bool_]:
        """(N,) whether a value is next to nothing against its usual, which is learnt from values that are not."""
        if (more := len(values) - self._usual[name].shape[1]) > 0:
            self._usual[name] = np.append(self._usual[name], _fresh(more), axis=1)
        cells = self._usual[name][:, : len(values)]
        usual, count = cells[_USUAL], cells[_COUNT]
        there = np.isfinite(values)
        early = np.flatnonzero(there & (count < _LEARN))
        if len(early):
            cells[_ROWS + count[early].astype(np.intp), early] = values[early]
            count[early] += 1
            usual[early] = np.nanmedian(cells[_ROWS:, early], axis=0)
        limit = np.minimum(LIVE * usual, _HIGHEST_V if name == "power.voltage" else np.inf)
        known = there & (count >= _LEARN)
        known[early] = False
        gone = np.asarray(known & (values < limit))
        _anew(name, cells, values, gone, time)
        learn = known & ~gone
        clipped = np.minimum(values[learn], _MOST * np.maximum(usual[learn], _LEAST[name]))
        usual[learn] += _GAIN * (clipped - usual[learn])
        return gone

    def snapshot(self) -> dict[str, Any]:
        usual = {name: cells.copy() for name, cells in self._usual.items()}
        return {"usual": usual, "dark": {e: dict(known) for e, known in self.dark.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._usual = {name: _taken(state["usual"][name]) for name in _LEARNT}
        self.dark = dict(state["dark"])


def _why(volts: float, watts: float, dead: bool, idle: bool) -> str:
    """In words what shows that there is no power. dead, idle: whether voltage and load are gone."""
    if dead:
        return f"no voltage ({volts:.0f} V){', no load' if idle else ''}"
    return f"no load ({watts:.0f} W); its voltage was not read"


def _fresh(size: int) -> NDArray[np.float64]:
    """Cells of units of which nothing is known."""
    cells = np.full((_ROWS + _LEARN, size), np.nan)
    cells[_COUNT] = 0.0
    return cells


def _taken(saved: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cells of a snapshot; an older version kept the first rows only, and learns anew who had not learnt enough."""
    cells = _fresh(saved.shape[1])
    if len(saved) == len(cells):
        return saved
    done = saved[_COUNT] >= _LEARN
    cells[: _COUNT + 1, done] = saved[: _COUNT + 1, done]
    return cells


def _anew(
    name: str, cells: NDArray[np.float64], values: NDArray[np.float64], gone: NDArray[np.bool_], time: int
) -> None:
    """Takes a level that is next to nothing of the usual one for the usual, where a unit has stood at it for long."""
    level, since = cells[_LEVEL], cells[_SINCE]
    level[np.isfinite(values) & ~gone] = np.nan
    off = gone & (values >= _LEAST[name])
    if not off.any():
        return
    moved = off & ~((np.abs(values - level) <= _STEADY * level) & (since <= time))
    level[moved], since[moved] = values[moved], time
    settled = off & (time - since > _ANEW[name])
    cells[_USUAL, settled], level[settled] = values[settled], np.nan
    gone &= ~settled
