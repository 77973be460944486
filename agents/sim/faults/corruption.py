"""Silent data corruption: GPUs that compute wrong results without reporting an error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary.ledger import CLEAN_ROUNDS
from agents.sim.effects import Defect, Effects
from agents.sim.faults.kind import DAY, HOUR, MONTH, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.physics.canary import EXECUTIONS, PERIOD
from agents.sim.schedule import Stop

_FAILS_AFTER = 6 * HOUR  # mean time to a failure that training shows; chosen
_JUMP = (0.5, 2.0)  # powers of ten by which the gradient norm jumps; training guards look for a factor of 5
_STEPS = 15.0  # s for which the jump lasts: a few steps; chosen
_DIES = 30.0  # s until a job has died of a NaN; chosen


@dataclass(frozen=True)
class SilentDataCorruption(Kind):
    """GPU sometimes computes wrong results: its canary digest differs from the known answer, other telemetry is
    normal."""

    name = "sdc"
    row = 10
    target = "gpu"
    detectability = "hard"
    attribution = "sdc"
    seen = (
        "wrong digests, if a canary exercises the defect (2 of 5) and it is frequent; a jump of the gradient norm in "
        "17 of 100"
    )
    unseen = (
        "any sign in other telemetry: ECC counts, clocks and temperatures are normal; a defect that no canary exercises"
    )
    rate = Rate(0.37, "1M GPU-hours", "AEGIS, OSDI'26: 13 GPUs in 35M GPU-hours")
    lasts = Span(30 * DAY, high=30 * DAY)
    signals = ("event:digest", "rank.gradient_norm")
    ranges: ClassVar = {"decades": (-8.0, 0.0)}
    limits: ClassVar = {"probability": (0.0, 1.0), "decades": (-12.0, 0.0)}
    choices: ClassVar = {
        "reached": ("yes", "yes", "no", "no", "no"),  # synthetic tests find under 40 % of defective GPUs [SDCHunter]
        "failure": (*["none"] * 83, *["jump"] * 16, "nonfinite"),  # 3 of 18 [AEGIS]; 1 % are NaN [GPU SDC, DSN'26]
    }
    severe = "decades"
    tail = (CLEAN_ROUNDS + 1) * PERIOD
    probability: float | None = None  # of a wrong digest per round; if given, only the canary detects it
    decades: float | None = None  # log10 of the error probability per kernel at the onset; doubles monthly
    reached: str | None = None  # whether a canary exercises the defect
    failure: str | None = None  # effect on training: none, jump (gradient norm) or nonfinite (the job dies)

    def error_probabilities(self, fault: Fault) -> NDArray[np.float64]:
        """Returns the probability of a wrong digest in each whole period from onset to end: 1 - (1 - p)^n for n
        kernels."""
        later = PERIOD * np.arange(np.floor((fault.end - fault.onset) / PERIOD))
        if self.probability is not None:
            return np.full(len(later), self.probability)
        assert self.decades is not None
        p = np.minimum(10**self.decades * 2 ** (later / MONTH), 1 - 1e-12)  # [SDCHunter]; its growth is assumed
        return np.asarray(-np.expm1(EXECUTIONS * np.log1p(-p)) * (self.reached == "yes"))

    def failed_rounds(self, fault: Fault) -> NDArray[np.bool_]:
        """Returns whether the round in each of these periods fails."""
        return _misses(fault)

    def failure_time(self, fault: Fault) -> float:
        """Returns the second at which training shows it; infinite if it never does."""
        if self.probability is not None or self.failure == "none":
            return np.inf
        moment = fault.onset + float(fault.rng(8).exponential(_FAILS_AFTER))
        return moment if moment < fault.end else np.inf

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.defects.append(Defect(fault.device, fault.onset, self.failed_rounds(fault)))
        moment = self.failure_time(fault)
        on = effects.active(moment, moment + _STEPS)
        if on.any():
            jump = np.nan if self.failure == "nonfinite" else 10 ** fault.rng(9).uniform(*_JUMP)
            effects.gpu.gradient.scale(fault.device, np.where(on, jump, 1.0))

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        rounds = np.flatnonzero(self.failed_rounds(fault))
        first = fault.onset + PERIOD * float(rounds[0]) if len(rounds) else fault.end
        return min(first, self.failure_time(fault))

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the signals and events that show it: without a wrong digest those of training alone."""
        shown = self.failed_rounds(fault).any()
        return self.signals if shown else tuple(name for name in self.signals if name.startswith("rank."))

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns its class in the truth."""
        if self.failed_rounds(fault).any():
            return "hard"
        return "soft" if self.failure_time(fault) < fault.end else "invisible"

    def severity(self) -> float | None:
        """Returns the probability of a wrong result if given; otherwise see `Kind.severity`."""
        return super().severity() if self.probability is None else self.probability

    def job_stop(self, fault: Fault, layout: Layout) -> Stop | None:
        """Returns the stop of jobs that it causes."""
        moment = self.failure_time(fault)
        if self.failure != "nonfinite" or moment == np.inf:
            return None
        return Stop(min(moment + _DIES, fault.end), (int(layout.node_of_gpu[fault.device]),), 0.0)


@lru_cache(maxsize=1024)
def _misses(fault: Fault) -> NDArray[np.bool_]:
    assert isinstance(fault.kind, SilentDataCorruption)
    chances = fault.kind.error_probabilities(fault)
    return np.asarray(fault.rng(7).random(len(chances)) < chances)
