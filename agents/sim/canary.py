"""Canary rounds: every 120 s the GPUs of a node compute one known problem each and tell the digest of the answer.

The problem changes from round to round, the same for all nodes; sound GPUs agree on its digest. Nodes take turns
within the period.
"""

from __future__ import annotations

import hashlib
import math

from agents.sim.effects import Defect, Effects, Happening
from agents.sim.noise import generator

PERIOD = 120.0  # s between two rounds of a node; chosen: under 0.5 % of a GPU's time for a canary of half a second
PROBLEMS = ("gemm-bf16-4096", "gemm-fp8-4096", "attention-bf16-2048")
VERSION = hashlib.blake2b(b"simulated canary 1", digest_size=4).hexdigest()


def rounds(effects: Effects, seed: int, interval: float) -> None:
    """Adds the digest events of the block."""
    layout = effects.layout
    for node in range(layout.nodes):
        turn = math.floor(PERIOD * node / layout.nodes / interval) * interval
        first = max(0, math.floor((effects.since - turn) / PERIOD) + 1)
        for number in range(first, math.floor((effects.until - turn) / PERIOD) + 1):
            _round(effects, seed, node, number, turn + number * PERIOD)


def digest(problem: str, salt: str = "") -> str:
    """The right answer's digest, or with `salt` a wrong one."""
    return hashlib.blake2b(f"{problem} {VERSION} {salt}".encode(), digest_size=8).hexdigest()


def _round(effects: Effects, seed: int, node: int, number: int, time: float) -> None:
    """One event per GPU of the node."""
    layout, problem = effects.layout, PROBLEMS[number % len(PROBLEMS)]
    first = node * layout.gpus_per_node
    here = [d for d in effects.defects if first <= d.gpu < first + layout.gpus_per_node and d.onset <= time < d.end]
    right = {"canary": problem, "version": VERSION, "digest": digest(problem)}
    for gpu in range(first, first + layout.gpus_per_node):
        wrong = any(_errs(d, seed, number) for d in here if d.gpu == gpu)
        data = {**right, "digest": digest(problem, f"{seed} {gpu} {number}")} if wrong else right
        effects.events.append(Happening(time, layout.entities["gpu"][gpu], "digest", data))


def _errs(defect: Defect, seed: int, number: int) -> bool:
    """Whether this defect shows in this round; the same for every cut of the blocks."""
    return bool(generator(seed, 60, defect.gpu, number).random() < defect.probability)
