"""When each device was last known to compute rightly, and which jobs used it since: their results are in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.base.event_data import text
from pipeline.records import Event, Frame

_JOBS = 2048  # jobs remembered, the oldest ended ones go first; chosen
NAMED = 10
"""Jobs named in evidence, the newest; their number is told too. Chosen."""


class Tested:
    """Time of the last right answer and right rounds in all, of each device that frames name; a part() of SdcVote.

    Of cores only those that gave a wrong answer have a ledger; GPUs and cores alike have 16 bytes here.
    """

    def __init__(self) -> None:
        self._cells: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}  # class -> (2, N): time, rounds
        self._places: dict[str, tuple[str, int]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._nodes: dict[str, dict[str, int]] = {}  # node -> its two devices that were right last, and when

    def look(self, frames: Mapping[str, Frame]) -> None:
        """Learns the names of devices."""
        for device_class in ("gpu", "canary"):
            frame = frames.get(device_class)
            known = len(self._names.get(device_class, ()))
            if frame is None or len(frame.entities) <= known:
                continue
            for i in range(known, len(frame.entities)):
                self._places[frame.entities[i]] = (device_class, i)
            self._names[device_class] = tuple(frame.entities)
            cells = self._cells.get(device_class, np.zeros((2, 0), np.int64))
            if cells.shape[1] < len(frame.entities):
                self._cells[device_class] = np.zeros((2, len(frame.entities)), np.int64)
                self._cells[device_class][:, : cells.shape[1]] = cells

    def right(self, entity: str, time: int, rounds: int, node: str | None) -> None:
        """Enters right rounds of a device of a node."""
        if node is not None:
            _two(self._nodes.setdefault(node, {}), entity, time)
        place = self._places.get(entity)
        if place is not None:
            cells = self._cells[place[0]]
            cells[0, place[1]] = max(cells[0, place[1]], time)
            cells[1, place[1]] += rounds

    def of(self, entity: str) -> tuple[int, int]:
        """(time of the last right answer, right rounds in all); 0 if none is known."""
        place = self._places.get(entity)
        if place is None:
            return 0, 0
        time, rounds = self._cells[place[0]][:, place[1]].tolist()
        return time, rounds

    def newest_beside(self, entity: str, node: str | None) -> int:
        """When another device of the same node was right last; 0 if none is known."""
        beside = self._nodes.get(node, {}) if node is not None else {}
        return max((time for other, time in beside.items() if other != entity), default=0)

    def snapshot(self) -> dict[str, Any]:
        cells = {name: cells.copy() for name, cells in self._cells.items()}
        nodes = {node: dict(beside) for node, beside in self._nodes.items()}
        return {"cells": cells, "names": dict(self._names), "nodes": nodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cells, self._nodes = dict(state["cells"]), dict(state["nodes"])
        self._names = {name: tuple(names) for name, names in state["names"].items()}
        self._places = {e: (name, i) for name, names in self._names.items() for i, e in enumerate(names)}


def _two(beside: dict[str, int], entity: str, time: int) -> None:
    """Enters a device of a node among the two that were right last."""
    beside[entity] = max(beside.get(entity, 0), time)
    if len(beside) > 2:
        del beside[min(beside, key=lambda e: (beside[e], e))]


class Users:
    """Which job was on which GPU from when to when, as job_start and job_end tell; a part() of detectors."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    def hear(self, frames: Mapping[str, Frame]) -> None:
        """Takes the events of an instant."""
        told = [e for f in frames.values() for e in f.events if e.kind in ("job_start", "job_end")]
        for event in sorted(told, key=lambda e: (e.time, e.entity, e.kind == "job_start")):
            self._take(event)
        if told and len(self.jobs) > _JOBS:
            oldest = sorted(self.jobs, key=lambda j: (self.jobs[j]["end"] or event.time, j))
            for job in oldest[: len(self.jobs) - _JOBS]:
                del self.jobs[job]

    def _take(self, event: Event) -> None:
        if event.kind == "job_end":
            if event.entity in self.jobs:
                self.jobs[event.entity]["end"] = event.time
            return
        ranks = event.data.get("ranks")
        job = self.jobs.setdefault(event.entity, {"start": event.time, "end": None, "gpus": {}})
        job["end"] = None
        for place in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = text(place.get("gpu")) if isinstance(place, Mapping) else ""
            if gpu:
                job["gpus"].setdefault(gpu, event.time)

    def since(self, gpu: str, time: int) -> list[str]:
        """Jobs that used a GPU at `time` or later, the newest first."""
        mine = ((name, job) for name, job in self.jobs.items() if gpu in job["gpus"])
        used = [(job["gpus"][gpu], name) for name, job in mine if (job["end"] or time) >= time]
        return [name for _, name in sorted(used, reverse=True)]

    def snapshot(self) -> dict[str, Any]:
        return {name: {**job, "gpus": dict(job["gpus"])} for name, job in self.jobs.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.jobs = {name: dict(job) for name, job in state.items()}
