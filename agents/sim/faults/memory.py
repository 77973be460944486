"""Memory of GPUs: bursts of corrected errors, uncorrectable errors, rows that cannot be remapped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Channel, Effects
from agents.sim.faults.gpu import RESET, hang_job, reset
from agents.sim.faults.kind import DAY, HOUR, Chain, Fault, Kind, Rate, Span
from agents.sim.physics.kernel_log import Line, log_xids
from agents.sim.physics.memory import DRAM_CORRECTED

_DIES = 5.0  # s from the kill of a process to the end of its job; chosen
_OVERDISPERSION = 2.0  # variance = mean + 2 mean^2 of the counts of an hour; assumed
_REPEATS = 0.3  # probability that a corrected error hits a row with earlier errors, and remaps it; chosen
_SPARE_ROWS = 8  # in a bank of device memory [NVIDIA, GPU memory error management]
_DRAIN = 120.0  # s from the end of a job to its node's return, if only a GPU is reset; chosen


def _row(fault: Fault, *which: int) -> str:
    return f"0x{int(fault.rng(3, *which).integers(1 << 28, 1 << 36)):016x}"


def _dbe(fault: Fault, moment: float, where: str = "framebuffer") -> Line:
    partition, sub = fault.rng(4).integers(0, (10, 4)).tolist()
    text = (
        f"An uncorrectable double bit error (DBE) has been detected on GPU in the {where} at physAddr {_row(fault)} "
        f"partition {partition}, subpartition {sub}."
    )
    return Line(moment, 48, text)


def _remap_line(fault: Fault, moment: float, *which: int) -> Line:
    return Line(
        moment, 63, f"Row Remapper: New row ({_row(fault, *which)}) marked for remapping, reset gpu to activate."
    )


def _count(effects: Effects, channel: Channel, device: int, moments: NDArray[np.float64]) -> None:
    """Adds one in the tick that first sees each moment."""
    here = moments[(moments > effects.since) & (moments <= effects.until)]
    if len(here):
        ticks = np.searchsorted(effects.time, here)
        channel.add(device, np.bincount(ticks, minlength=len(effects.time)))


@lru_cache(maxsize=1024)
def _errors(fault: Fault, per_hour: float) -> NDArray[np.float64]:
    """Returns the times of errors at a rate that is drawn every hour: hourly counts are negative binomial."""
    rng, hours = fault.rng(5), int(np.ceil((fault.end - fault.onset) / HOUR))
    mean = per_hour * rng.gamma(1 / _OVERDISPERSION, _OVERDISPERSION, hours)
    counts = rng.poisson(mean)
    found = fault.onset + HOUR * (np.repeat(np.arange(hours), counts) + rng.random(int(counts.sum())))
    return np.sort(found[found < fault.end])


def _death(fault: Fault, after: float = _DIES) -> float:
    """Returns the second at which the job has died, `after` s from the onset."""
    return min(fault.onset + after, fault.end)


@dataclass(frozen=True)
class HbmCorrectedBurst(Kind):
    """Row of device memory goes bad: ECC corrects 10 to 1,000 times as many errors as before, in bursts."""

    name = "hbm_ce_burst"
    row = 3
    target = "gpu"
    detectability = "soft"
    attribution = "memory"
    seen = "corrected errors of device memory; sometimes a remapped row with XID 63, pending until the reset at the end"
    unseen = "whether an uncorrectable error will follow: in 3 of 10 cases, on average two days later"
    rate = Rate(5.0, "1M GPU-hours", "assumed")
    lasts = Span(6 * HOUR, 42 * HOUR, 14 * DAY)
    signals = ("gpu.dram_corrected", "gpu.ecc_corrected", "gpu.rows_corrected", "gpu.rows_pending", "event:xid")
    ranges: ClassVar = {"decades": (1.0, 3.0)}
    limits: ClassVar = {"decades": (0.0, 5.0)}  # 5.0: an error every seven seconds; more need too much memory
    severe = "decades"
    chain = Chain("hbm_ue_contained", 0.3, Span(mean=48 * HOUR, high=30 * DAY))
    decades: float | None = None  # powers of ten above the fleet's mean of 0.005 an hour

    def flap_times(self, fault: Fault) -> NDArray[np.float64]:
        """Returns the times of the corrected errors."""
        assert self.decades is not None
        return _errors(fault, DRAM_CORRECTED * 10**self.decades)

    def remap_time(self, fault: Fault) -> float | None:
        """Returns when a row is remapped, at an error that is not the first; None if none is."""
        errors, nth = self.flap_times(fault), int(fault.rng(6).geometric(_REPEATS))
        return float(errors[nth]) if nth < len(errors) else None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        gpu, device = effects.gpu, fault.device
        _count(effects, gpu.dram_corrected, device, self.flap_times(fault))
        moment = self.remap_time(fault)
        if moment is not None:
            gpu.rows_corrected.add(device, effects.impulse(moment))
            gpu.rows_pending.add(device, effects.active(moment, fault.end))
            log_xids(effects, device, [_remap_line(fault, moment)])
            reset(effects, device, fault.end)

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        errors = self.flap_times(fault)
        return float(errors[0]) if len(errors) else fault.end

    def job_death_time(self, fault: Fault) -> float | None:
        """Returns when the job ends for the remap, if a row is remapped."""
        if self.remap_time(fault) is None:
            return None
        return _death(fault, max(_DIES, fault.end - _DRAIN - fault.onset))


@dataclass(frozen=True)
class HbmContained(Kind):
    """Contained uncorrectable error in device memory: its process dies, the row is remapped at the next reset."""

    name = "hbm_ue_contained"
    row = 4
    target = "gpu"
    detectability = "hard"
    attribution = "memory"
    seen = "XID 48, 63 and 94, one uncorrected error, one remapped row that is pending until the reset at the end"
    unseen = "before the reset, whether the remap will help: it does in 23 of 25 cases"
    rate = Rate(11.3, "1M GPU-hours", "Delta, H100: mean time between uncorrectable errors 88,768 h")
    lasts = Span(1800.0, high=6 * HOUR)
    signals = ("event:xid", "gpu.dram_uncorrected", "gpu.ecc_uncorrected", "gpu.rows_uncorrected", "gpu.rows_pending")
    choices: ClassVar = {
        "kills": (*["no"] * 7, *["yes"] * 3),
        "clears": (*["yes"] * 23, *["no"] * 2),
    }
    kills: str | None = None  # whether it stops the job: 3.4 of 11.3 do (Llama 3 compared with Delta)
    clears: str | None = None  # whether the first reset repairs it: 92 % (Delta); else it recurs after half of the time

    def error_times(self, fault: Fault) -> tuple[float, ...]:
        """Returns the times of the errors."""
        again = (fault.onset + fault.end) / 2
        return (fault.onset,) if self.clears == "yes" else (fault.onset, again + min(300.0, (fault.end - again) / 2))

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        gpu, device = effects.gpu, fault.device
        for moment in self.error_times(fault):
            lines = [_dbe(fault, moment), _remap_line(fault, moment + 0.01)]
            killed = [Line(moment + 0.02, 94, "Contained: SM (0x1). RST: No, D-RST: No", True)]
            log_xids(effects, device, lines + killed)
            gpu.dram_uncorrected.add(device, effects.impulse(moment))
            gpu.rows_uncorrected.add(device, effects.impulse(moment))
        gpu.rows_pending.add(device, effects.active(fault.onset, fault.end))
        if self.clears == "no":
            reset(effects, device, (fault.onset + fault.end) / 2)
        if self.kills == "yes":
            hang_job(effects, device, fault.onset, fault.onset + _DIES)
        reset(effects, device, fault.end)

    def job_death_time(self, fault: Fault) -> float:
        """Returns when the job has died: immediately, or when it is stopped for the reset."""
        first = fault.end if self.clears == "yes" else (fault.onset + fault.end) / 2
        return _death(fault, _DIES if self.kills == "yes" else max(_DIES, first - _DRAIN - fault.onset))


@dataclass(frozen=True)
class HbmUncontained(Kind):
    """Uncontained uncorrectable error in device memory: all processes on the GPU die, and it must be reset."""

    name = "hbm_ue_uncontained"
    row = 5
    target = "gpu"
    detectability = "hard"
    attribution = "memory"
    seen = "XID 95 with 48, 63 and 154, uncorrected errors, a remapped row that is pending until the reset at the end"
    unseen = "which results since the error are wrong"
    rate = Rate(1.0, "1M GPU-hours", "assumed")
    lasts = Span(1800.0, high=6 * HOUR)
    signals = ("event:xid", "gpu.dram_uncorrected", "gpu.ecc_uncorrected", "gpu.rows_uncorrected", "gpu.rows_pending")
    ranges: ClassVar = {"errors": (1.0, 6.0)}
    limits: ClassVar = {"errors": (1.0, 1e6)}
    errors: float | None = None  # uncorrected errors until the GPU is drained, rounded down

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.errors is not None
        gpu, device, onset = effects.gpu, fault.device, fault.onset
        lines = [_dbe(fault, onset), _remap_line(fault, onset + 0.01)]
        lines.append(Line(onset + 0.02, 95, "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", True))
        log_xids(effects, device, [*lines, Line(onset + 0.5, 154, RESET)])
        gpu.dram_uncorrected.add(device, int(self.errors) * effects.impulse(onset))
        gpu.rows_uncorrected.add(device, effects.impulse(onset))
        gpu.rows_pending.add(device, effects.active(onset, fault.end))
        hang_job(effects, device, onset, onset + _DIES)
        reset(effects, device, fault.end)

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        return _death(fault)


@dataclass(frozen=True)
class RemapFailure(Kind):
    """Bank of device memory uses up its spare rows: the ninth bad row cannot be remapped, the GPU must be replaced."""

    name = "remap_failure"
    row = 6
    target = "gpu"
    detectability = "hard"
    attribution = "memory"
    seen = "eight rows remapped one by one with XID 63, then XID 64 with 48 and 154, rows_failed until the replacement"
    unseen = "that all eight rows were of one bank"
    rate = Rate(0.3, "1M GPU-hours", "assumed")
    lasts = Span(4 * HOUR, high=7 * DAY)
    signals = (
        *("event:xid", "gpu.rows_failed", "gpu.rows_corrected", "gpu.rows_pending"),
        *("gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.ecc_uncorrected"),
    )
    ranges: ClassVar = {"wears": (300.0, 1800.0)}
    limits: ClassVar = {"wears": (0.0, 1e6)}
    wears: float | None = None  # s until the spare rows are used up, at most a third of its duration; chosen

    def failure_time(self, fault: Fault) -> float:
        """Returns the second at which a row cannot be remapped."""
        assert self.wears is not None
        return fault.onset + min(self.wears, (fault.end - fault.onset) / 3)

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which it needs a page: rows that are remapped in time only need a ticket."""
        return self.failure_time(fault)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        device, onset = fault.device, self.failure_time(fault)
        self._wear(fault, effects)
        failed = Line(onset + 0.01, 64, f"Row Remapper: New row ({_row(fault)}) could not be marked for remapping")
        log_xids(effects, device, [_dbe(fault, onset), failed, Line(onset + 0.5, 154, RESET)])
        effects.gpu.dram_uncorrected.add(device, effects.impulse(onset))
        effects.gpu.rows_failed.add(device, effects.active(onset, fault.end))
        hang_job(effects, device, onset, onset + _DIES)
        reset(effects, device, fault.end)

    def _wear(self, fault: Fault, effects: Effects) -> None:
        """Remaps rows with corrected errors, each at its second error, until the bank has no spare row."""
        length = self.failure_time(fault) - fault.onset
        rows = fault.onset + length * (np.arange(_SPARE_ROWS) + 0.5 * fault.rng(7).random(_SPARE_ROWS)) / _SPARE_ROWS
        log_xids(effects, fault.device, [_remap_line(fault, float(row), k) for k, row in enumerate(rows)])
        _count(effects, effects.gpu.rows_corrected, fault.device, rows)
        _count(effects, effects.gpu.dram_corrected, fault.device, np.repeat(rows, 2))
        effects.gpu.rows_pending.add(fault.device, effects.active(float(rows[0]), fault.end))

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        return _death(fault, self.failure_time(fault) - fault.onset + _DIES)


@dataclass(frozen=True)
class SramEcc(Kind):
    """Uncorrectable error in caches or registers, among many corrected ones: the process on the GPU dies."""

    name = "sram_ecc"
    row = 7
    target = "gpu"
    detectability = "hard"
    attribution = "memory"
    seen = "XID 48 and 94 with 154, one uncorrected error on the chip, corrected ones within ten minutes"
    unseen = "whether a particle or a weak cell caused it, until it recurs"
    rate = Rate(0.9, "1M GPU-hours", "Llama 3")
    lasts = Span(1800.0, high=6 * HOUR)
    signals = ("event:xid", "gpu.sram_uncorrected", "gpu.ecc_uncorrected", "gpu.sram_corrected", "gpu.ecc_corrected")
    ranges: ClassVar = {"corrected": (10.0, 2000.0)}
    limits: ClassVar = {"corrected": (0.0, 1e7)}
    severe = "corrected"
    corrected: float | None = None  # errors that ECC corrects, rounded down; Azure fails a node at 10,000

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.corrected is not None
        device, onset = fault.device, fault.onset
        lines = [_dbe(fault, onset, "SM"), Line(onset + 0.02, 94, "Contained: SM (0x1). RST: Yes, D-RST: No", True)]
        log_xids(effects, device, [*lines, Line(onset + 0.5, 154, RESET)])
        effects.gpu.sram_uncorrected.add(device, effects.impulse(onset))
        length = min(600.0, fault.end - onset)
        _count(effects, effects.gpu.sram_corrected, device, onset + length * fault.rng(5).random(int(self.corrected)))
        hang_job(effects, device, onset, onset + _DIES)
        reset(effects, device, fault.end)

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        return _death(fault)
