"""Why a rank may be slow: what its GPU and its node show. Visible causes are named, none is guessed.

Suspicions name the cause of slow ranks: one GPU, a whole node, or none because the stage is slow; and how sure that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison
from detectors.base.state import State, memory, part
from detectors.base.streams import LEARN, LEAST_COHORT, Bools, Channel, Floats, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, read_reasons, reason_names, reason_title
from detectors.straggler.mass_throttling import step_frozen
from detectors.straggler.power_caps import SEVERAL
from detectors.straggler.pressure import Pressure
from detectors.straggler.rank_slots import MOST_OF_COHORT, RankSlots
from pipeline.model.entity_names import entity_name, pager_title
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


_PART = 0.5  # share of a node's ranks that are slow together from which the node is blamed; chosen
_SOME = 0.25  # the same share that keeps it blamed, so that the blame does not flicker; chosen
_FEW = 8  # ranks of a stage below which two slow ones are too many for its median: they are suspects; as LEAST_PEERS
_ALIKE = 0.4  # share of the slowest one's slowdown from which others of its node are slow with it; chosen
_BEYOND = 0.5  # share of its slowdown that must be beyond that of the rest of its stage and node; chosen
_SURE, _NODE, _RANK, _ALL, _MANY = range(5)
_DOUBTS = ("", "no other node to compare", "no peer to compare", "all of its stage is slow", "half its stage is slow")
"""Why the stage itself may be slow, by the numbers above."""
_MOST_CAUSES = 3  # in the evidence; chosen


@dataclass(frozen=True)
class Suspicion:
    """One condition: `entity` is blamed for its slow `slots`. doubt: why the stage itself may be slow."""

    entity: str
    slots: tuple[int, ...]
    doubt: str = ""


def find_suspicions(
    slow: Bools,
    effect: Floats,
    counted: Bools,
    throttled: Bools,
    ranks: RankSlots,
    most: float,
    delta: float,
    known: Mapping[str, object],
) -> list[Suspicion]:
    """Returns nodes and ranks to blame.

    slow: have a condition.   effect: slowdown of each, relevant from `delta` on.   counted: could be slow.
    throttled: with many others of their stage, which does not excuse the healthy ones.   known: open conditions.
    """
    found = []
    lagging = slow | (effect >= delta)
    innocent, doubts = _judge_stages(slow, effect, lagging, counted, ranks, most)
    if throttled.any() and (slow & ~throttled).any():
        apart, more = _judge_stages(slow & ~throttled, effect, lagging, counted & ~throttled, ranks, most)
        innocent, doubts = np.where(throttled, innocent, apart), np.where(throttled, doubts, more)
    slow = slow & ~innocent & ~_slow_with_stage(slow, effect, counted, ranks, delta)
    nodes = ranks.numbers["node"]
    for node in np.unique(nodes[slow]).tolist():
        mine = slow & (nodes == node)
        if node >= 0 and (entity := ranks.entities["node"][node]):
            present = counted & (nodes == node)
            late = np.flatnonzero(lagging & present & ~innocent & (effect >= _ALIKE * effect[mine].max()))
            share = _SOME if entity in known else _PART
            if len(late) >= max(2.0, share * np.count_nonzero(present)):
                found.append(Suspicion(entity, tuple(late.tolist()), _DOUBTS[doubts[late].min()]))
                continue
        found += [Suspicion(ranks.ranks[i], (i,), _DOUBTS[doubts[i]]) for i in np.flatnonzero(mine).tolist()]
    return found


def _slow_with_stage(slow: Bools, effect: Floats, counted: Bools, ranks: RankSlots, delta: float) -> Bools:
    """Returns (S,) ranks that are compared with all of a job, and slow together with the rest of their stage and node.

    When a stage has more work for a while, the job's median moves, and each rank learns a little of that: as it ends,
    a few of them depart from their baseline by as much as matters, and all of their stage by a little less.
    """
    found = np.zeros(len(slow), bool)
    node, stage = ranks.numbers["node"], ranks.numbers["stage"]
    for mine, around in {(int(node[i]), int(stage[i])) for i in np.flatnonzero(slow & ranks.cross_stage)}:
        of_stage = counted & (stage == around)
        mates, ours = of_stage & (node != mine), of_stage & (node == mine)
        if mates.any() and np.count_nonzero(of_stage) >= LEAST_COHORT:
            others = min(float(np.median(effect[mates])), float(np.median(effect[ours])))
            alike = (others > (1 - _BEYOND) * effect) & (effect - others < delta)
            found |= slow & ours & alike
    return found


def _judge_stages(
    slow: Bools, effect: Floats, lagging: Bools, counted: Bools, ranks: RankSlots, most: float
) -> tuple[Bools, NDArray[np.int64]]:
    """Returns (S,) ranks of stages that are slow as a whole; and (S,) index into _DOUBTS where it may be the stage."""
    innocent, doubts = np.zeros(len(slow), bool), np.zeros(len(slow), np.int64)
    stages = np.where(ranks.numbers["stage"] >= 0, ranks.numbers["stage"], -2 - ranks.numbers["job"])
    for stage in np.unique(stages[slow]).tolist():
        members = counted & (stages == stage)
        late = lagging & members
        size = np.count_nonzero(members)
        if size < LEAST_COHORT:
            # its ranks are compared with the whole job: without an unchanged one, the stage may have more work
            if (effect[members] >= _ALIKE * effect[members].max(initial=0.0)).all():
                doubts[members] = _RANK if size == 1 else _ALL
            continue
        if np.count_nonzero(late) <= most * size:
            continue
        nodes = ranks.numbers["node"][members]
        if (nodes < 0).any():
            innocent |= members
            continue
        all_of, late_of = np.bincount(nodes), np.bincount(ranks.numbers["node"][late], minlength=int(nodes.max()) + 1)
        slow_nodes = np.count_nonzero(late_of > _PART * np.maximum(all_of, 1))
        all_nodes = np.count_nonzero(all_of)
        if all_nodes == 1:
            doubts[members] = _NODE
        elif slow_nodes > max(1.0, most * all_nodes) or (slow_nodes == 0 and all_nodes > 1):
            if size < _FEW and np.count_nonzero(late) < size:
                doubts[members] = _MANY
            else:
                innocent |= members
    return innocent, doubts


def collect_causes(suspicion: Suspicion, causes: CauseTracker, ranks: RankSlots, time: int) -> list[Cause]:
    """Returns what GPUs and node show, each cause once; of GPUs only what at least half of the slow ranks show."""
    by_key: dict[str, list[Cause]] = {}
    for slot in suspicion.slots:
        for cause in causes.gpu_causes(slot, ranks, time):
            by_key.setdefault(cause.key, []).append(cause)
    found = [same[0] for same in by_key.values() if len(same) >= _PART * len(suspicion.slots)]
    slot = suspicion.slots[0]
    return [*found, *causes.node_causes(ranks.ancestor("node", slot), ranks, slot)][:_MOST_CAUSES]


def describe_causes(found: Sequence[Cause]) -> str:
    """Returns the causes in full, for the evidence."""
    return "; ".join(cause.text for cause in found) if found else "cause not visible"


def write_title(suspicion: Suspicion, compared: Comparison, gpu: str | None, causes: Sequence[Cause]) -> str:
    """Returns the title: the entity, its slowdown, and the first cause or doubt."""
    percent = f"{100 * compared.effect:.0f} % slower"
    if suspicion.entity.startswith("node:"):
        text = f"{len(suspicion.slots)} ranks {percent}"
    else:
        text = f"{percent} on {entity_name(gpu)}" if gpu else percent
    note = causes[0].title if causes else suspicion.doubt
    return pager_title(suspicion.entity, f"{text}, {note}" if note else text)
