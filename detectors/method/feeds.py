"""Which power feeds are dark: no voltage, an open breaker, or no load where there was one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.records import SECOND, Frame
from pipeline.signals import CATALOGUE

SIGNALS = ("power.voltage", "power.draw", "power.breaker", "power.state")
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
        self._usual: dict[str, dict[str, list[float]]] = {}  # entity -> signal -> [mean, samples]
        self.dark: dict[str, dict[str, Any]] = {}
        """Entity -> since, looks, why, seen: those that had no power when they were looked at last."""

    def look(self, frame: Frame | None, time: int) -> None:
        """Takes the frame of class power, None if there is none at this instant."""
        if self.dark:
            self._lapse(time)
        if frame is None or not frame.values:
            return
        columns = {name: frame[name] for name in SIGNALS if name in frame.values}
        spoke = np.zeros(len(frame.entities), bool)
        for column in columns.values():
            spoke |= ~np.isnan(column[: len(spoke)])
        for i in np.flatnonzero(spoke).tolist():
            entity = frame.entities[i]
            why = self._why(entity, {name: float(column[i]) for name, column in columns.items()})
            if why:
                known = self.dark.setdefault(entity, {"since": frame.time, "looks": 0, "why": why})
                known["looks"] += 1
                known["why"], known["seen"] = why, frame.time
            else:
                self.dark.pop(entity, None)

    def _lapse(self, time: int) -> None:
        """Forgets what was not measured for long."""
        for entity, known in list(self.dark.items()):
            known["seen"] = min(known.get("seen", time), time)  # a time that stepped back is no future
            if time - known["seen"] > LAPSES:
                del self.dark[entity]

    def _why(self, entity: str, now: Mapping[str, float]) -> str:
        """What shows that there is no power; empty where there is some."""
        gone = {name: self._gone(entity, name, now.get(name, np.nan)) for name in ("power.voltage", "power.draw")}
        if now.get("power.breaker") == _OPEN:
            return "a tripped breaker"
        if gone["power.voltage"]:
            load = ", no load" if gone["power.draw"] else ""
            return f"no voltage ({now['power.voltage']:.0f} V){load}"
        if gone["power.draw"] and np.isnan(now.get("power.voltage", np.nan)):
            return f"no load ({now['power.draw']:.0f} W); its voltage was not read"
        return ""

    def _gone(self, entity: str, name: str, value: float) -> bool:
        """Whether a value is next to nothing against its usual, which is learnt from values that are not."""
        if np.isnan(value):
            return False
        usual = self._usual.setdefault(entity, {}).setdefault(name, [value, 0.0])
        if usual[1] >= _LEARN and value < LIVE * usual[0]:
            return True
        usual[1] += 1
        usual[0] += max(_GAIN, 1 / usual[1]) * (value - usual[0])
        return False

    def snapshot(self) -> dict[str, Any]:
        usual = {e: {name: list(cell) for name, cell in cells.items()} for e, cells in self._usual.items()}
        return {"usual": usual, "dark": {e: dict(known) for e, known in self.dark.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._usual, self.dark = dict(state["usual"]), dict(state["dark"])
