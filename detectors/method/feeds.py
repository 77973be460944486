"""Which power feeds are dark: no voltage, an open breaker, or no load where there was one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import SECOND, Frame
from pipeline.signals import CATALOGUE

SIGNALS = ("power.voltage", "power.draw", "power.breaker", "power.state")
_LEARNT = ("power.voltage", "power.draw")
LIVE = 0.1
"""Share of its usual voltage or load below which a feed is dark: EN 50160 calls less than 5 % an interruption, a
meter's error is added; chosen."""
LAPSES = 24 * 3600 * SECOND
"""What a meter told that is silent for so long is not known any more: it may be gone with its feed; chosen: work on a
feed is over within a day, or announced anew."""
_LEARN = 20  # samples until the usual is known
_GAIN = 0.02  # memory of about 50 samples; chosen
_OPEN = CATALOGUE["power.breaker"].states.index("tripped")


class Feeds:
    """Usual voltage and load of each unit, and since when it has been dark; plain data, a few units per row."""

    def __init__(self) -> None:
        self._usual = {name: np.full((2, 0), np.nan) for name in _LEARNT}  # by position: mean, samples
        self.dark: dict[str, dict[str, Any]] = {}
        """Entity -> since, looks, why, seen: those that had no power when they were looked at last."""

    def look(self, frame: Frame | None, time: int) -> None:
        """Takes the frame of class power, None if there is none at this instant."""
        if self.dark:
            self._lapse(time)
        if frame is None or not frame.values:
            return
        size = len(frame.entities)
        columns = {name: frame[name] if name in frame.values else np.full(size, np.nan) for name in SIGNALS}
        gone = {name: self._gone(name, columns[name]) for name in _LEARNT}
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

    def _gone(self, name: str, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """(N,) whether a value is next to nothing against its usual, which is learnt from values that are not."""
        if (more := len(values) - self._usual[name].shape[1]) > 0:
            self._usual[name] = np.append(self._usual[name], np.full((2, more), np.nan), axis=1)
        usual, count = self._usual[name][:, : len(values)]
        there = ~np.isnan(values)
        first = there & np.isnan(count)
        usual[first], count[first] = values[first], 0.0
        gone = np.asarray(there & (count >= _LEARN) & (values < LIVE * usual))
        learn = there & ~gone
        count[learn] += 1
        usual[learn] += np.maximum(_GAIN, 1 / count[learn]) * (values - usual)[learn]
        return gone

    def snapshot(self) -> dict[str, Any]:
        usual = {name: cells.copy() for name, cells in self._usual.items()}
        return {"usual": usual, "dark": {e: dict(known) for e, known in self.dark.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._usual = {name: state["usual"][name] for name in _LEARNT}
        self.dark = dict(state["dark"])


def _why(volts: float, watts: float, dead: bool, idle: bool) -> str:
    """In words what shows that there is no power. dead, idle: whether voltage and load are gone."""
    if dead:
        return f"no voltage ({volts:.0f} V){', no load' if idle else ''}"
    return f"no load ({watts:.0f} W); its voltage was not read"
