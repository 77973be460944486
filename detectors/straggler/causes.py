"""Why a rank may be slow: what its GPU and its node show. Visible causes are named, none is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.state import State, memory, part
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, read_reasons, reason_names, reason_title
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
"""3 % of clock: two of the 15 MHz steps in which clocks are reported. Chosen."""
_FRESH = 60 * SECOND  # us for which a throttle bit explains slowness; chosen
_PRESSED, _TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
slowness. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_LATELY = 60 * SECOND  # us in which a flickering cap bit shows once: of 0.3 of the time, in 9 of 10 cases; chosen
_NEVER = -(1 << 62)  # us; no cap was reported yet
_OFTEN, _SLOWLY = 0.5, 1e-4
"""A GPU that is under its power cap for at least half of the time is so by its load; learned over a day. Chosen."""
_POWER_SHARE = 0.4  # least share of a slowdown by which a lower cap lowers the power: it falls with the clock; chosen


@dataclass(frozen=True, slots=True)
class Cause:
    """One visible cause. title: in few words; text: in full; physical: a fact of the device, which needs no hold."""

    key: str
    title: str
    text: str
    signal: str
    physical: bool
    value: float


POLICY = Cause("power_cap", "power cap", "a power cap, which is policy", "gpu.throttle_reasons", False, CAPPED)


@dataclass
class CauseTracker(State):
    """GPUs and nodes of ranks; arrays by slot, of nodes by their column.

    throttled, bits:   last throttling (us) and its bits.   capped_at, capped: last power cap bit, and whether it is
    recent; known: whether the bits are read.   capped_share: share of the time under a cap, from `readings`.
    width, generation: newest of the PCIe link.   power_unlearned_at: when its usual power was last not known.
    """

    clocks: Streams = part(lambda: Streams(CLOCK))
    power: Streams = part(lambda: Streams(CLOCK))
    pressure: Pressure = part(lambda: Pressure("node.cpu_pressure"), of="node")
    throttled: NDArray[np.int64] = memory(0, np.int64)
    bits: NDArray[np.uint64] = memory(0, np.uint64)
    width: Floats = memory(np.nan)
    generation: Floats = memory(np.nan)
    capped: Bools = memory(False, np.bool_)
    known: Bools = memory(False, np.bool_)
    capped_at: NDArray[np.int64] = memory(_NEVER, np.int64)
    capped_share: Floats = memory(0.0)
    readings: NDArray[np.int64] = memory(0, np.int64)
    power_unlearned_at: NDArray[np.int64] = memory(0, np.int64)

    def read_throttling(self, frames: Mapping[str, Frame], ranks: RankSlots) -> Bools:
        """Adds throttle bits and PCIe links; returns (S,) ranks whose GPU reports a power cap."""
        size = len(ranks)
        self.grow(size)
        gpus = frames.get("gpu")
        if gpus is None:
            self.capped[:] = self.known[:] = False
            return np.zeros(size, bool)
        bits, known = read_reasons(ranks.read_gpus(gpus, "gpu.throttle_reasons"))
        throttled = has_reason(bits, THROTTLE)
        if throttled.any():
            self.throttled[:size][throttled] = gpus.time
            self.bits[:size][throttled] = bits[throttled] & np.uint64(THROTTLE)
        for name, last in self._links():
            if name in gpus.values:
                now = ranks.read_gpus(gpus, name)
                np.copyto(last[:size], now, where=np.isfinite(now))
        capped = has_reason(bits, CAPPED)
        self.capped_at[:size][capped] = gpus.time
        self.capped[:size] = np.abs(gpus.time - self.capped_at[:size]) <= _LATELY
        self.known[:size] = known
        readings, share = self.readings[:size], self.capped_share[:size]
        readings += known
        gain = np.where(readings <= LEARN, 1 / np.maximum(readings, 1), _SLOWLY)
        share += np.where(known, gain * (capped - share), 0.0)
        return np.asarray(capped)

    def _links(self) -> tuple[tuple[str, Floats], tuple[str, Floats]]:
        return ("gpu.pcie_width", self.width), ("gpu.pcie_generation", self.generation)

    def explained_by_cap(self, slots: NDArray[np.intp], slower: float, since: int, ranks: RankSlots) -> bool:
        """Returns whether a new power cap lowers the clocks of several GPUs of these nodes.

        New is a cap that the GPU was rarely under; or, where all are always under one, a lower one than before against
        their peers': at the same limit a slow GPU draws as much as before, at a lower one it draws less. Its power
        before `since` (us), when it became slow, must have been learned by then; else it cannot be decided.
        """
        nodes = ranks.numbers["node"]
        around = np.flatnonzero(np.isin(nodes, nodes[slots]) & (nodes >= 0))
        around = around[around < self.clocks.cells.shape[1]]
        less, known = np.zeros(len(self.capped), bool), min(self.power.cells.shape[1], len(self.capped))
        less[:known] = self.power.cells[kernel.EFFECT, :known] >= _POWER_SHARE * slower
        less |= self.power_unlearned_at > since
        new = self.capped & ((self.capped_share < _OFTEN) | less)
        low = around[new[around] & (self.clocks.cells[kernel.EFFECT, around] >= slower / 2)]
        return bool(len(low) >= SEVERAL and np.count_nonzero(new[slots]) >= len(slots) / 2)

    def is_proof(self, cause: Cause, slots: NDArray[np.intp]) -> bool:
        """Returns whether a cause is a fact of the device, which needs no hold.

        Under a cap the cap decides the clock: whether a lower one has come shows when the power has followed.
        """
        capped = np.count_nonzero(self.capped[slots]) >= len(slots) / 2
        return cause.physical and not (capped and cause.signal == "gpu.sm_clock")

    def read_clocks(self, frames: Mapping[str, Frame], ranks: RankSlots, gate: Bools, frozen: Bools, time: int) -> None:
        """Adds the SM clocks against those of the peers, and the processors' pressure. frozen: learn nothing."""
        gpus, nodes = frames.get("gpu"), frames.get("node")
        if gpus is not None and "gpu.sm_clock" in gpus.values:
            clock = ranks.read_gpus(gpus, "gpu.sm_clock")
            step_frozen(self.clocks, -np.log(np.where(clock > 0, clock, np.nan)), ranks.groups, time, gate, frozen)
        if gpus is not None and (self.capped_share >= _OFTEN).any():
            measured = "gpu.power" in gpus.values
            power = ranks.read_gpus(gpus, "gpu.power") if measured else np.full(len(ranks), np.nan)
            step_frozen(self.power, -np.log(np.where(power > 0, power, np.nan)), ranks.groups, time, gate, frozen)
            counts = self.power.counts
            self.power_unlearned_at[: len(counts)][counts < LEARN] = time
        if nodes is not None:
            self.pressure.update(nodes)

    def reset_slots(self, slots: Sequence[int], elsewhere: bool) -> None:
        """Resets slots with other software, or with another rank or GPU (`elsewhere`)."""
        for streams in (self.clocks, self.power):
            streams.reset(_mask(slots, streams.cells.shape[1]))
        if elsewhere:
            self.grow(max(slots) + 1)
            self.width[slots] = self.generation[slots] = np.nan
            self.throttled[slots] = self.bits[slots] = self.readings[slots] = 0
            self.capped_share[slots] = 0.0

    def clear(self, slots: Sequence[int]) -> None:
        """Ends low clocks of some slots; their baselines stay."""
        if len(slots):
            clear_conditions(self.clocks, slots)
            clear_conditions(self.power, slots)

    def gpu_causes(self, slot: int, ranks: RankSlots, time: int) -> list[Cause]:
        """Returns what the GPU of one rank shows."""
        found = []
        if self.throttled[slot] and abs(time - int(self.throttled[slot])) <= _FRESH:
            bits = int(self.bits[slot])
            text = f"throttle bit of its GPU: {reason_names(bits)}"
            found.append(Cause("throttled", reason_title(bits), text, "gpu.throttle_reasons", True, bits))
        if (effect := self._clock_deficit(slot, ranks)) > 0:
            below = -float(np.expm1(-effect))
            title = f"SM clock {100 * below:.0f} % low"
            text = f"SM clock {100 * below:.0f} % below that of its peers"
            found.append(Cause("sm_clock_below_peers", title, text, "gpu.sm_clock", True, round(below, 4)))
        for name, last in self._links():
            value, usual = float(last[slot]), _peer_median(last, slot, ranks)
            if value < usual:
                title = f"PCIe x{value:.0f}" if name == "gpu.pcie_width" else f"PCIe gen {value:.0f}"
                own = f"{value:.0f} lanes" if name == "gpu.pcie_width" else f"generation {value:.0f}"
                text = f"PCIe link at {own}, its peers' at {usual:.0f}"
                found.append(Cause(name.split(".")[1], title, text, name, True, value))
        return found

    def _clock_deficit(self, slot: int, ranks: RankSlots) -> float:
        """Returns ln by which a clock is below its peers'; 0 where it is not."""
        size = self.clocks.cells.shape[1]
        score, effect = self.clocks.cells[[kernel.UP, kernel.EFFECT], slot].tolist() if slot < size else (0.0, 0.0)
        if effect < CLOCK.delta or score <= CLOCK.threshold / 2:
            return 0.0
        effects = self.clocks.cells[kernel.EFFECT, : len(ranks)]
        mates = (ranks.groups[:size] == ranks.groups[slot]) & (ranks.groups[slot] >= 0)
        low = mates & (effects >= CLOCK.delta)
        if np.count_nonzero(low) > MOST_OF_COHORT * np.count_nonzero(mates) and (mates & ~low).any():
            effect -= min(float(np.median(effects[mates & ~low])), 0.0)  # the median is between both
        return float(effect)

    def node_causes(self, node: str | None, ranks: RankSlots, slot: int) -> list[Cause]:
        """Returns what the node of a rank shows against the other nodes of its job."""
        share = self.pressure.share_of(node) if node else float("nan")
        if node is None or not share >= _PRESSED:
            return []
        numbers = np.unique(ranks.numbers["node"][ranks.numbers["job"] == ranks.numbers["job"][slot]]).tolist()
        others = [name for n in numbers if n >= 0 and (name := ranks.entities["node"][n]) != node]
        usual = self.pressure.median_share(others)
        if share < _TIMES * usual:
            return []
        compared = f" (other nodes of the job {100 * usual:.0f} %)" if np.isfinite(usual) else ""
        title = f"tasks wait for CPU {100 * share:.0f} % of the time"
        text = f"tasks on {node} wait for a processor {100 * share:.0f} % of the time{compared}"
        return [Cause("cpu_pressure", title, text, "node.cpu_pressure", False, round(share, 3))]


def _peer_median(values: Floats, slot: int, ranks: RankSlots) -> float:
    """Returns the median of a slot's peers; NaN without any."""
    values = values[: len(ranks)]
    mates = (ranks.groups == ranks.groups[slot]) & (ranks.groups >= 0) & np.isfinite(values)
    return float(np.median(values[mates])) if mates.any() else float("nan")


def _mask(slots: Sequence[int], size: int) -> Bools:
    mask = np.zeros(size, bool)
    mask[[slot for slot in slots if slot < size]] = True
    return mask


def clear_conditions(streams: Streams, slots: Sequence[int]) -> None:
    """Ends the conditions of some streams and restarts their sums; their baselines stay."""
    cells = streams.cells
    known = [slot for slot in slots if slot < cells.shape[1]]
    cells[[[kernel.UP], [kernel.EFFECT]], known] = 0.0
    cells[kernel.WORD].view(np.uint32)[known] &= ~(kernel.ON_UP | kernel.HELD_BITS)
