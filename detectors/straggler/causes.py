"""Why a rank may be slow: what its GPU and its node show of it. Causes that are seen are named, none is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.state import grown
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, read_reasons, reason_names
from detectors.straggler.mass_throttling import step_frozen
from detectors.straggler.power_caps import SEVERAL
from detectors.straggler.pressure import Pressure
from detectors.straggler.rank_slots import MOST_OF_COHORT, RankSlots
from pipeline.model.records import SECOND, Frame

SIGNALS = (
    *("gpu.sm_clock", "gpu.throttle_reasons", "gpu.power", "gpu.pcie_width", "gpu.pcie_generation"),
    "node.cpu_pressure",
)
CLOCK = Channel(floor=0.01, delta=0.03)
"""3 % of clock: two of the 15 MHz steps in which clocks are told. Chosen."""
_FRESH = 60 * SECOND  # how long a throttle bit explains slowness; chosen
_PRESSED, _TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
slowness. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_LATELY = 60 * SECOND  # a cap of which the bit flickers is told once in so long: of 0.3 of the time, in 9 of 10; chosen
_NEVER = -(1 << 62)  # us; no cap was told yet
_OFTEN, _SLOWLY = 0.5, 1e-4
"""A GPU that is under its power cap for at least half of the time is so by its load; learnt over a day. Chosen."""
_DRAWS = 0.4  # share of a slowdown by which a lower cap lowers the draw, at least: power falls with the clock; chosen


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is seen. physical: a fact of the device itself, beside which no hold is needed."""

    key: str
    text: str
    signal: str
    physical: bool
    value: float


POLICY = Cause(
    "power_cap", "a power cap, which is policy, holds back their clocks", "gpu.throttle_reasons", False, CAPPED
)


class CauseTracker:
    """Watches GPUs and nodes of ranks; arrays by slot, of nodes by their place in the frame."""

    def __init__(self) -> None:
        self.clocks = Streams(CLOCK)
        self.throttled, self.bits = np.empty(0, np.int64), np.empty(0, np.uint64)
        self.pcie: dict[str, Floats] = {"gpu.pcie_width": np.empty(0), "gpu.pcie_generation": np.empty(0)}
        self.capped, self.known = np.empty(0, bool), np.empty(0, bool)
        self.capped_at = np.empty(0, np.int64)
        self.capped_share, self.readings = np.empty(0), np.empty(0, np.int64)
        self.power = Streams(CLOCK)
        self.power_unlearned_at = np.empty(0, np.int64)
        self.pressure = Pressure("node.cpu_pressure")

    def read_throttling(self, frames: Mapping[str, Frame], places: RankSlots) -> Bools:
        """Takes the throttle bits and the PCIe links; (S,) whose GPU says that a power cap holds it back."""
        self._grow(len(places))
        gpus = frames.get("gpu")
        if gpus is None:
            self.capped[:] = self.known[:] = False
            return np.zeros(len(places), bool)
        bits, told = read_reasons(places.read_gpus(gpus, "gpu.throttle_reasons"))
        throttled = has_reason(bits, THROTTLE)
        if throttled.any():
            self.throttled[throttled] = gpus.time
            self.bits[throttled] = bits[throttled] & np.uint64(THROTTLE)
        for name, last in self.pcie.items():
            if name in gpus.values:
                now = places.read_gpus(gpus, name)
                np.copyto(last, now, where=np.isfinite(now))
        capped = has_reason(bits, CAPPED)
        self.capped_at[: len(bits)][capped] = gpus.time
        self.capped[: len(bits)] = np.abs(gpus.time - self.capped_at[: len(bits)]) <= _LATELY
        self.known[: len(bits)] = told
        size, known = len(bits), self.known[: len(bits)]
        looks, usually = self.readings[:size], self.capped_share[:size]
        looks += known
        gain = np.where(looks <= LEARN, 1 / np.maximum(looks, 1), _SLOWLY)
        usually += np.where(known, gain * (capped - usually), 0.0)
        return np.asarray(capped)

    def explained_by_cap(self, slots: NDArray[np.intp], slower: float, since: int, places: RankSlots) -> bool:
        """Whether a power cap that is news to these GPUs holds back clocks of several of their nodes' GPUs.

        News is one that they were rarely under; or, where all are under one always, a lower one than before beside
        their peers': at the same limit a slow GPU draws as much as ever, at a lower one it draws less. What it drew
        before `since` (us), when it became slow, must have been learnt by then; else nobody can tell.
        """
        nodes = places.numbers["node"]
        around = np.flatnonzero(np.isin(nodes, nodes[slots]) & (nodes >= 0))
        around = around[around < self.clocks.cells.shape[1]]
        less, known = np.zeros(len(self.capped), bool), min(self.power.cells.shape[1], len(self.capped))
        less[:known] = self.power.cells[kernel.EFFECT, :known] >= _DRAWS * slower
        less[: len(self.power_unlearned_at)] |= self.power_unlearned_at[: len(less)] > since
        news = self.capped & ((self.capped_share < _OFTEN) | less)
        low = around[news[around] & (self.clocks.cells[kernel.EFFECT, around] >= slower / 2)]
        return bool(len(low) >= SEVERAL and np.count_nonzero(news[slots]) >= len(slots) / 2)

    def is_proof(self, cause: Cause, slots: NDArray[np.intp]) -> bool:
        """Whether it is a fact of the device, beside which no hold is needed. Under a cap it is the cap that makes the
        clock: whether a lower one has come is seen when the draw has followed."""
        capped = np.count_nonzero(self.capped[slots]) >= len(slots) / 2
        return cause.physical and not (capped and cause.signal == "gpu.sm_clock")

    def read_clocks(self, frames: Mapping[str, Frame], places: RankSlots, gate: Bools, still: Bools, time: int) -> None:
        """Takes the SM clocks against those of the peers, and the processors' pressure. still: who learns nothing."""
        gpus, nodes = frames.get("gpu"), frames.get("node")
        if gpus is not None and "gpu.sm_clock" in gpus.values:
            speed = places.read_gpus(gpus, "gpu.sm_clock")
            step_frozen(self.clocks, -np.log(np.where(speed > 0, speed, np.nan)), places.groups, time, gate, still)
        if gpus is not None and (self.capped_share >= _OFTEN).any():
            there = "gpu.power" in gpus.values
            drawn = places.read_gpus(gpus, "gpu.power") if there else np.full(len(places), np.nan)
            step_frozen(self.power, -np.log(np.where(drawn > 0, drawn, np.nan)), places.groups, time, gate, still)
            self._record_unlearned_power(time)
        if nodes is not None:
            self.pressure.update(nodes)

    def _record_unlearned_power(self, time: int) -> None:
        """Notes when of each it was last not known how much it usually draws."""
        counts = self.power.counts
        self.power_unlearned_at = grown(self.power_unlearned_at, len(counts), 0)
        self.power_unlearned_at[counts < LEARN] = time

    def _grow(self, size: int) -> None:
        more = size - len(self.throttled)
        if more > 0:
            self.throttled = np.append(self.throttled, np.zeros(more, np.int64))
            self.bits = np.append(self.bits, np.zeros(more, np.uint64))
            self.capped, self.known = (np.append(cells, np.zeros(more, bool)) for cells in (self.capped, self.known))
            self.capped_share = np.append(self.capped_share, np.zeros(more))
            self.readings = np.append(self.readings, np.zeros(more, np.int64))
            self.capped_at = np.append(self.capped_at, np.full(more, _NEVER))
            self.pcie = {name: np.append(last, np.full(more, np.nan)) for name, last in self.pcie.items()}

    def reset(self, slots: Sequence[int], elsewhere: bool) -> None:
        """Another rank, another GPU or other software than before."""
        for streams in (self.clocks, self.power):
            streams.reset(_mask(slots, streams.cells.shape[1]))
        if elsewhere:
            self._grow(max(slots) + 1)
            for last in self.pcie.values():
                last[slots] = np.nan
            self.throttled[slots] = self.bits[slots] = self.readings[slots] = 0
            self.capped_share[slots] = 0.0

    def clear(self, slots: Sequence[int]) -> None:
        """What made these clocks low is over; what they learnt stays."""
        if len(slots):
            clear_conditions(self.clocks, slots)
            clear_conditions(self.power, slots)

    def gpu_causes(self, slot: int, places: RankSlots, time: int) -> list[Cause]:
        """What the GPU of one rank shows."""
        found = []
        if self.throttled[slot] and abs(time - int(self.throttled[slot])) <= _FRESH:
            bits = int(self.bits[slot])
            found.append(
                Cause("throttled", f"throttle bit of its GPU: {reason_names(bits)}", "gpu.throttle_reasons", True, bits)
            )
        if (effect := self._clock_deficit(slot, places)) > 0:
            below = -float(np.expm1(-effect))
            words = f"SM clock {100 * below:.0f} % below what its peers lead one to expect"
            found.append(Cause("sm_clock_below_peers", words, "gpu.sm_clock", True, round(below, 4)))
        for name, unit in (("gpu.pcie_width", "lanes"), ("gpu.pcie_generation", "generation")):
            mine, usual = float(self.pcie[name][slot]), self._peer_median(self.pcie[name], slot, places)
            if mine < usual:
                what = f"PCIe link at {mine:.0f} {unit}" if unit == "lanes" else f"PCIe link at {unit} {mine:.0f}"
                found.append(Cause(name.split(".")[1], f"{what}, its peers' at {usual:.0f}", name, True, mine))
        return found

    def _clock_deficit(self, slot: int, places: RankSlots) -> float:
        """By how much the logarithm of a clock is below its peers'; 0 where it is not."""
        size = self.clocks.cells.shape[1]
        score, effect = self.clocks.cells[[kernel.UP, kernel.EFFECT], slot].tolist() if slot < size else (0.0, 0.0)
        if effect < CLOCK.delta or score <= CLOCK.threshold / 2:
            return 0.0
        effects = self.clocks.cells[kernel.EFFECT, : len(places)]
        mates = (places.groups[:size] == places.groups[slot]) & (places.groups[slot] >= 0)
        low = mates & (effects >= CLOCK.delta)
        if np.count_nonzero(low) > MOST_OF_COHORT * np.count_nonzero(mates) and (mates & ~low).any():
            effect -= min(float(np.median(effects[mates & ~low])), 0.0)  # the median lies between both
        return float(effect)

    @staticmethod
    def _peer_median(values: Floats, slot: int, places: RankSlots) -> float:
        """Median of its peers; NaN without any."""
        mates = (places.groups == places.groups[slot]) & (places.groups >= 0) & np.isfinite(values)[: len(places)]
        return float(np.median(values[: len(places)][mates])) if mates.any() else float("nan")

    def node_causes(self, node: str | None, places: RankSlots, slot: int) -> list[Cause]:
        """What the node of a rank shows beside the other nodes of its job."""
        share = self.pressure.share_of(node) if node else float("nan")
        if node is None or not share >= _PRESSED:
            return []
        numbers = np.unique(places.numbers["node"][places.numbers["job"] == places.numbers["job"][slot]]).tolist()
        usual = self.pressure.median_share(
            [name for n in numbers if n >= 0 and (name := places.entities["node"][n]) != node]
        )
        if share < _TIMES * usual:
            return []
        beside = f" (other nodes of the job {100 * usual:.0f} %)" if np.isfinite(usual) else ""
        told = f"tasks on {node} wait for a processor {100 * share:.0f} % of the time{beside}"
        return [Cause("cpu_pressure", told, "node.cpu_pressure", False, round(share, 3))]

    def snapshot(self) -> dict[str, Any]:
        names = (
            "throttled",
            "bits",
            "pcie",
            "capped",
            "capped_at",
            "known",
            "capped_share",
            "readings",
            "power_unlearned_at",
        )
        parts = {name: getattr(self, name).snapshot() for name in ("clocks", "power", "pressure")}
        return {**parts, **{name: getattr(self, name) for name in names}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.clocks.restore(state["clocks"])
        self.power.restore(state["power"])
        self.pressure.restore(state["pressure"])
        for name in state.keys() - {"clocks", "power", "pressure"}:
            setattr(self, name, state[name])


def _mask(slots: Sequence[int], size: int) -> Bools:
    mask = np.zeros(size, bool)
    mask[[slot for slot in slots if slot < size]] = True
    return mask


def clear_conditions(streams: Streams, slots: Sequence[int]) -> None:
    """Ends the conditions of some streams and begins their sums anew; what they learnt stays."""
    cells = streams.cells
    mine = [slot for slot in slots if slot < cells.shape[1]]
    cells[[[kernel.UP], [kernel.EFFECT]], mine] = 0.0
    cells[kernel.WORD].view(np.uint32)[mine] &= ~(kernel.ON_UP | kernel.HELD_BITS)
