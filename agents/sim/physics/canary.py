"""Canary rounds: every 120 s the GPUs of a node compute one known problem each; events as agents send them.

The problem changes from round to round, the same for all nodes. A healthy GPU reports one round in six hours; a faulty
one reports at once, and then every round until twelve in a row are correct (canary/ledger.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary.ledger import CLEAN_ROUNDS
from agents.sim.effects import Defect, Effects, EventTime, PlannedEvent
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator

PERIOD = 120.0  # s between two rounds of a node; chosen
TOOK = 0.12  # s of a round: 0.1 % of a GPU's time, as in agents
EXECUTIONS = 520
"""Matrix products in a round: one of 4096^3 in bf16 takes 0.23 ms of an H100."""
REPORT_EVERY = 180
"""A correct GPU reports one of so many rounds: six hours, as agents do."""
PROBLEMS = ("gemm-bf16-4096", "gemm-fp8-4096", "attention-bf16-2048")
VERSION = hashlib.blake2b(b"simulated canary 1", digest_size=4).hexdigest()


def digest(problem: str, salt: str = "") -> str:
    """Returns the digest of the correct result, or with `salt` a wrong one."""
    return hashlib.blake2b(f"{problem} {VERSION} {salt}".encode(), digest_size=8).hexdigest()


def correct_round(problem: str, began: EventTime, took: float) -> dict[str, object]:
    """Returns the event data of a correct round, which also counts the rounds not reported before."""
    answer = digest(problem)
    reported = {"canary": problem, "version": VERSION, "digest": answer, "expected": answer, "golden": True}
    return {**reported, "runs": EXECUTIONS, "rounds": REPORT_EVERY - 1, "began": began, "took": took}


class Canaries:
    """Canary rounds of the whole fleet. Nodes start at different times within the period."""

    def __init__(self, layout: Layout, interval: float, seed: int) -> None:
        self.layout, self.seed = layout, seed
        self._offset = np.floor(PERIOD * np.arange(layout.nodes) / layout.nodes / interval) * interval
        self._due = generator(seed, 61).integers(0, REPORT_EVERY, layout.gpus)

    def add_events(self, effects: Effects) -> None:
        """Adds the digest events of the block."""
        first = np.maximum(0, np.floor((effects.since - self._offset) / PERIOD).astype(np.int64) + 1)
        last = np.floor((effects.until - self._offset) / PERIOD).astype(np.int64)
        for number in range(int(first.min()), int(last.max()) + 1):
            nodes = (first <= number) & (number <= last)
            reported = nodes[self.layout.node_of_gpu] & ((number + self._due) % REPORT_EVERY == 0)
            wrong, watched = self._defects(effects.defects, nodes, number)
            reported[list(watched)] = True
            for gpu in np.flatnonzero(reported).tolist():
                self._report_round(effects, gpu, number, wrong.get(gpu), watched.get(gpu))

    def _defects(
        self, defects: list[Defect], nodes: NDArray[np.bool_], number: int
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Returns the GPUs that fail in this round with their failure rate, and those that report it.

        The latter with the rounds that they report: those since their last report.
        """
        wrong: dict[int, float] = {}
        watched: dict[int, int] = {}
        for defect in defects:
            node = self.layout.node_of_gpu[defect.gpu]
            place = int((self._offset[node] + number * PERIOD - defect.onset) // PERIOD)
            if not nodes[node] or place < 0:
                continue
            if place < len(defect.failed_rounds) and defect.failed_rounds[place]:
                wrong[defect.gpu] = float(defect.failed_rounds.mean())
            errors = np.flatnonzero(defect.failed_rounds[: place + 1])
            usual = (number + int(self._due[defect.gpu])) % REPORT_EVERY or REPORT_EVERY
            if len(errors) and (place - errors[-1] <= CLEAN_ROUNDS or usual == REPORT_EVERY):
                before = errors[errors < place]
                reported = min(place - 1, int(before[-1]) + CLEAN_ROUNDS) if len(before) else place - usual
                watched[defect.gpu] = min(usual, place - reported)
        return wrong, watched

    def _report_round(self, effects: Effects, gpu: int, number: int, wrong: float | None, rounds: int | None) -> None:
        """Adds the event of one GPU, unless its driver does not respond."""
        time = float(self._offset[self.layout.node_of_gpu[gpu]] + number * PERIOD)
        if effects.gpu.gone and effects.gpu.gone.array()[np.searchsorted(effects.time, time), gpu]:
            return
        problem = PROBLEMS[(number + number // REPORT_EVERY) % len(PROBLEMS)]
        data = correct_round(problem, EventTime(time - TOOK), TOOK) | dict(self._wrong(gpu, number, problem, wrong))
        if rounds is not None:
            data["rounds"] = rounds
        effects.events.append(PlannedEvent(time, self.layout.entities["gpu"][gpu], "digest", data))

    def _wrong(self, gpu: int, number: int, problem: str, share: float | None) -> Iterator[tuple[str, object]]:
        """Returns the data of a wrong round: its digest, the problem, and how many of three repeats failed too."""
        if share is not None:
            yield "golden", False
            yield "format", problem.split("-")[1]
            yield "digest", digest(problem, f"{self.seed} {gpu} {number}")
            yield "wrong", [problem]
            yield "again", int(generator(self.seed, 60, gpu, number).binomial(3, share))
