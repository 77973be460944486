"""Where entities stand in a frame, on which job a GPU works, which GPUs a server has: looked up in trouble."""

from __future__ import annotations

from pipeline.records import Frame
from pipeline.topology import Topology, kind_of


class Places:
    """Index of each entity of a frame of one class, renewed when the frame grew."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def value(self, frame: Frame | None, signal: str, entity: str) -> float:
        """A value of one entity; NaN where there is none."""
        if frame is None or signal not in frame.values:
            return float("nan")
        if len(self._of) != len(frame.entities):
            self._of = {e: i for i, e in enumerate(frame.entities)}
        place, column = self._of.get(entity, -1), frame.values[signal]
        return float(column[place]) if 0 <= place < len(column) else float("nan")


class Jobs:
    """GPU -> the job of the rank on it, and node -> its GPUs; renewed when the topology changed."""

    def __init__(self) -> None:
        self._key: tuple[int, int] = (0, -1)
        self._of: dict[str, str] = {}
        self._in: dict[str, list[str]] = {}

    def of(self, gpu: str, topology: Topology) -> str | None:
        """The job on a GPU; None if none is known."""
        self._renew(topology)
        return self._of.get(gpu)

    def gpus(self, node: str, topology: Topology) -> frozenset[str]:
        """The GPUs of a server."""
        self._renew(topology)
        return frozenset(self._in.get(node, ()))

    def _renew(self, topology: Topology) -> None:
        key = (id(topology), topology.version)
        if key == self._key:
            return
        self._key, self._of, self._in = key, {}, {}
        for entity in topology.parents:
            kind = kind_of(entity)
            if kind == "rank":
                on, job = topology.above_of_kind(entity, "gpu"), topology.above_of_kind(entity, "job")
                if on and job:
                    self._of[on] = job
            elif kind == "gpu" and (node := topology.above_of_kind(entity, "node")):
                self._in.setdefault(node, []).append(entity)
