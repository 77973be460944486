"""Finds GPUs that cool worse than they did: against their own past at the same load, and the GPUs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.budget import rule_line
from detectors.base.cohorts import Peers, SpanningCohorts
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.statistics import grouped_median
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import per_device_topology, pop_members_mask
from detectors.heat.drift import SURE, SlowTrends, trend_budget
from detectors.heat.references import CoolingReferences
from detectors.heat.resistance import ResistanceSample, ThermalResistance
from detectors.heat.throttling import FEWEST, MOST, HeatVerdict, ThermalThrottling, Times
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

CLOSE_K = 3.0  # K below its limit at which a GPU is as good as throttled: three steps of NVML's rounding; chosen
_WARM_K = 3.0  # K from which warm coolant or air is reported by itself, as by `coolant` and `thermal_inlet`
_LEAST_K = 2.0  # K of a ticket at least: two steps of NVML's rounding
_FOLLOWS = 0.3  # share of a core's excess by which the memory on the same plate warms at least; chosen
_CERTAIN, _CERTAIN_SUM = 0.2, 30.0
"""ln of R that no fan or neighbour explains while the node has one load, and a sum above every threshold: reported
however noisy the site is. Chosen: in simulated worlds of air and liquid healthy GPUs stay below 0.1."""
_LATCHED = 3600 * SECOND  # us without a sample after which a condition starts over: its load may never return; chosen
_RISES, _RISES_SURE = 16, 4.5
"""Minutes that must rise one after another before the time left is stated, and Mann-Kendall's z of it: a step of any
size within them stays below 3."""
_LEAST_NODES = 3
"""Nodes of a loop from which their median shows what it does, and of a rack that it is named for. Chosen."""


@dataclass(frozen=True, slots=True)
class NodeIndex:
    """Nodes of the GPUs. node: (N,) number of the GPU's node, -1 none.   names: by number.   first: (M,) a GPU of each.

    rack: of each node, "" none.   peers: (M,) number of the loop, hall or fleet that it is compared in.
    """

    node: NDArray[np.int32]
    names: list[str]
    first: NDArray[np.int64]
    rack: list[str]
    peers: NDArray[np.int32]


class GpuNodes:
    """The node of each GPU, and what each node is compared in."""

    def __init__(self) -> None:
        self._peers = SpanningCohorts("loop", "cdu", "hall", least=_LEAST_NODES)

    @per_device_topology
    def find(self, frame: Frame) -> NodeIndex:
        """Returns the nodes of a frame of class gpu."""
        above, first = frame.topology.ancestor_of_kind, dict[str, int]()
        node = frame.topology.group_numbers(frame.entities, "node")
        for i, entity in enumerate(frame.entities):
            if name := above(entity, "node"):
                first.setdefault(name, i)
        at, racks = np.array([*first.values()], int), [above(e, "rack") or "" for e in first]
        return NodeIndex(node, list(first), at, racks, self._peers.groups(frame)[at])


@dataclass(frozen=True, slots=True)
class GpuHeat:
    """State of the GPUs at an instant, (N,) each.

    on:        condition of a core that is real now.   doubted: only its
    sensor moved.   left: K to its own limit, NaN unknown.   throttled: heat slows it down.   excess: K above what is
    usual at its load.
    """

    frame: Frame
    sample: ResistanceSample
    step: Step
    nodes: Step
    index: NodeIndex
    on: Bools
    doubted: Bools
    throttled: Bools
    left: Floats

    @property
    def excess(self) -> Floats:
        """(N,) see the class; NaN where it cannot be judged now, as while a load settles."""
        return np.where(self.sample.usable, self.sample.rise * -np.expm1(-self.step.effect), np.nan)

    def is_hot(self, at: Times) -> bool:
        """Returns whether one of these GPUs is slowed down by heat, or is about to be."""
        return bool((self.throttled[at] | (self.left[at] <= CLOSE_K)).any())


@dataclass
class Thermal(Detector):
    """Peer-conditioned CUSUM on ln((T - reference) / P) of each GPU, less its usual value at this load, within its
    node; the same of the median of each node within its coolant loop or hall; Mann-Kendall on hourly means.

    Suspect once the sum passes its threshold and R is up by `delta`; ticket after `patience` s. Page only with harm:
    the GPU is slowed down by heat, is 3 K below the limit that it reports, or will be within `near` minutes. Most GPUs
    of a node, or nodes of a rack, are one finding on the node or rack: their coolant or air. After work on a GPU it is
    learnt again, but its node is compared with its usual value before: a coupling that was not opened fully.

    A trend of two days (z > 5) with R up by `worn` is a ticket, with the days left if the GPU reports its limit.

    A core that warms without its memory is a faulty sensor: a suspect; see telemetry_sensor. Memory that warms without
    its core is reported by `memory`.

    A GPU that reports thermal throttling for two frames is a suspect at any R, a ticket after `patience` s, a page
    after `hold` s unless R is known to be normal: then it is one ticket until a day without throttling, and none while
    its coolant or air is 3 K above the mean of a day. A loop, CDU or
    rack is one finding when GPUs of most of its nodes throttle: a ticket immediately for 30 % of its working GPUs,
    a page once they did for `hold` s. A hardware slowdown alone (0x8) is named so: it may be a power brake as well.

    Source: R = dT/P, published lags of 5 to 60 s (resistance.py); delta: three times what 1 K of NVML's rounding is at
    40 K over the coolant; limits: NVML's T.limit and clock event reasons; hold: twice the longest
    benign slowdown of 300 s, chosen; 30 %: from there on a median does not hold (Huber, 1981).
    """

    name: ClassVar[str] = "thermal"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.temperature", "gpu.power")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.energy", "gpu.memory_temperature", "gpu.throttle_reasons", "gpu.thermal_margin", "gpu.slowdown_margin"),
        *("gpu.operating_max_margin", "gpu.memory_max_margin", "coolant.supply_temperature", "sensor.temperature"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Idle GPUs, and one that works alone in its node; loads that it has not seen for some minutes; what moves all "
        "GPUs of a loop, or of a hall on air, until heat slows them down; wear of less than 6 %; and whether paste, "
        "plate or a clogged channel is to blame."
    )

    delta: float = 0.08
    worn: float = 0.06
    """ln of R since the first half day; hourly means are good to 1 %, other jobs move them by a few; chosen."""
    patience: float = 240.0
    """s after which a suspect is a ticket; with the CUSUM's own time still within 10 min; chosen."""
    hold: float = 600.0
    near: float = 60.0
    """Minutes; a page is harm now or within the hour."""

    resistance: ThermalResistance = part(ThermalResistance)
    references: CoolingReferences = part(CoolingReferences, of="sensor")
    cores: Streams = part(lambda: Streams(Channel(floor=0.012, delta=0.08, phi=0.6)))
    memories: Streams = part(lambda: Streams(Channel(floor=0.5, delta=1.0, phi=0.6, both=True)))
    nodes: Streams = part(lambda: Streams(Channel(floor=0.012, delta=0.08, phi=0.6)), of="node")
    trends: SlowTrends = part(SlowTrends)
    minutes: SlowTrends = part(lambda: SlowTrends(bin_s=60))
    gates: Gates = part(Gates)
    throttling: ThermalThrottling = part(ThermalThrottling)
    since: Times = memory(0, np.int64)
    judged_at: Times = memory(0, np.int64)
    normal_at: Times = memory(0, np.int64)
    wearing: Bools = memory(False, np.bool_)
    doubted: Bools = memory(False, np.bool_)
    shifted: Bools = memory(False, np.bool_)
    in_maintenance: Bools = memory(False, np.bool_)
    accepted: list[str] = notes(list)
    conditions: OpenConditions = notes()
    _peers: Peers = field(
        default_factory=lambda: Peers(("node",), ("rack", "@sku"), ("cdu", "@sku"), ("@sku",), ("rack",), least=4),
        init=False,
        repr=False,
    )
    _index: GpuNodes = field(default_factory=GpuNodes, init=False, repr=False)

    def __post_init__(self) -> None:
        self.cores.channel = self.nodes.channel = Channel(floor=0.012, delta=self.delta, phi=0.6)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on GPUs that are hotter than their power explains, and on their nodes and racks."""
        self.gates.update(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        n, index = len(frame.entities), self._index.find(frame)
        self.grow(n)
        self.throttling.grow(n)
        in_maintenance = self.gates.maintenance_mask(frame)
        unsuspected = self._find_unsuspected(n, index)
        self._relearn_changed(frame, index, in_maintenance, unsuspected[2])
        references = self.references.read(frame, frames.get("coolant"), frames.get("sensor"))
        groups = self._peers.groups(frame)
        sample = self.resistance.measure(frame, *references, unsuspected, groups)
        self.shifted[:n] = sample.shifted
        if sample.fresh.any():
            self.cores.reset(sample.fresh)
            self.memories.reset(sample.fresh)
        gate = sample.usable & ~in_maintenance
        kinds = self.kinds(frame)
        step = self.cores.step(sample.value, groups, frame.time, gate, kinds)
        memory_step = self.memories.step(sample.above, groups, frame.time, gate, kinds)
        nodes = self._step_nodes(sample, index, frame.time, ~in_maintenance)
        self._update_trends(sample, step, gate, frame.time)
        throttled = self.throttling.update(frame["gpu.throttle_reasons"], frame.time) & ~in_maintenance
        heat = self._collect_heat(frame, sample, (step, memory_step, nodes), index, throttled)
        powers, reported = self.resistance.powers(len(throttled)), self._find_parts_of_reported(heat)
        units, members = self.throttling.find_units(frame, throttled, powers, index.node, self.hold)
        found = self._find_blamed(heat, members, reported)
        found |= self._find_throttling(heat, found, members | reported)
        found = units | found
        close_ended(self.conditions, {*found, *self.throttling.units, *self._find_unmeasured(heat)})
        return list(self._report(frame, found))

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        return [
            *super().budget(),
            f"wear: {trend_budget(8)}, and by {self.worn:.0%} at least",
            f"throttling: {rule_line('clock event reasons, twice in a row')}",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns a GPU, or all below a node or rack, again from the next frame of GPUs on."""
        self.accepted.append(entity)

    # --- measurements

    def _relearn_changed(self, frame: Frame, index: NodeIndex, in_maintenance: Bools, calm: Bools) -> None:
        """Resets GPUs after work on them, new software or feedback: plates, sensors and fan curves may be others.

        Also what could not be judged for _LATCHED, since its load did not return or its peers moved as one. calm: (N,)
        GPUs whose nodes are not suspected.
        """
        n = len(in_maintenance)
        changed = self.in_maintenance[:n] & ~in_maintenance
        self.in_maintenance[:n] = in_maintenance
        if updated := {e.entity for e in frame.events if e.kind == "version"}:
            changed |= np.fromiter((e in updated for e in frame.entities), bool, n)
        if (accepted := pop_members_mask(self.accepted, frame)) is not None:
            changed |= accepted
            self.throttling.accept(accepted, frame.time)
            self.resistance.forget(accepted)
            whole = np.bincount(index.node[~accepted & (index.node >= 0)], minlength=len(index.names)) == 0
            self.nodes.reset(whole)
        self.throttling.well_at[:n][changed] = 0
        latched = (self.judged_at[:n] > 0) & (np.abs(frame.time - self.judged_at[:n]) > _LATCHED)
        known = np.zeros(n, bool)
        known[: self.cores.cells.shape[1]] = self._read_on(self.cores)[:n]
        changed |= latched & (known | self.shifted[:n])
        if not changed.any():
            return
        self.resistance.learn_again(changed, calm)
        for piece in (self.cores, self.memories, self.trends, self.minutes):
            piece.reset(changed)
        for times in (self.since, self.judged_at, self.normal_at):
            times[:n][changed] = 0
        self.wearing[:n][changed] = False

    @staticmethod
    def _read_on(streams: Streams) -> Bools:
        """Returns the streams with a condition."""
        words = streams.cells[kernel.WORD].view(np.uint32)
        return np.asarray((words & (kernel.ON_UP | kernel.ON_DOWN)) != 0)

    def _find_unsuspected(self, n: int, index: NodeIndex) -> Bools:
        """Returns (3, N) cores and memories whose usual values may be learnt, and GPUs whose nodes have no
        condition."""
        found = np.ones((3, n), bool)
        for mine, streams in zip(found, (self.cores, self.memories), strict=False):
            cells = streams.cells[:, :n]
            mine[: cells.shape[1]] = np.maximum(cells[kernel.UP], cells[kernel.DOWN]) <= 2.0
        found[0] &= ~self.shifted[:n]
        found[2] = ~np.isin(index.node, np.flatnonzero(self._read_on(self.nodes)))
        return found

    def _step_nodes(self, sample: ResistanceSample, index: NodeIndex, time: int, gate: Bools) -> Step:
        """Adds the median of the GPUs of each node, over its usual value before the last work on it."""
        middle, count = grouped_median(np.where(gate, sample.lasting, np.nan), index.node)
        return self.nodes.step(middle[index.first], index.peers, time, count[index.first] >= 2)

    def _update_trends(self, sample: ResistanceSample, step: Step, gate: Bools, time: int) -> None:
        """Adds what each is above its peers to hourly means, and its K to those of a minute; finds the GPUs that
        wear."""
        above = np.where(gate & ~step.alone, sample.value - step.median, np.nan)
        self.minutes.add(sample.rise * -np.expm1(-above), time)
        if self.trends.add(above, time):
            z, grown = self.trends.test()
            wearing = self.wearing[: len(z)]
            starts = (z > SURE) & (grown > self.worn)
            wearing[:] = np.where(wearing, grown > self.worn / 2, starts) & np.isfinite(grown)

    def _collect_heat(
        self, frame: Frame, sample: ResistanceSample, steps: tuple[Step, Step, Step], index: NodeIndex, throttled: Bools
    ) -> GpuHeat:
        step, memory_step, nodes = steps
        n, time = len(throttled), frame.time
        for at, mask in ((self.judged_at, step.judged), (self.normal_at, step.judged & ~step.moved)):
            normal = mask & (step.effect < self.delta / 2) if at is self.normal_at else mask
            at[:n] = np.where(normal, time, np.minimum(at[:n], time))  # the clock may have been set back
        recent = time - self.judged_at[:n] <= self.hold * SECOND
        real = step.effect - np.nan_to_num(sample.power_error) >= self.delta / 2
        warmer = sample.rise * -np.expm1(-step.effect)
        apart = memory_step.judged & (memory_step.effect <= -(1 - _FOLLOWS) * warmer)
        self.doubted[:n] = np.where(step.judged, apart, self.doubted[:n] & step.on)
        doubted = self.doubted[:n] & ~throttled
        limits = np.fmax(
            np.fmax(frame["gpu.slowdown_margin"], frame["gpu.operating_max_margin"]), frame["gpu.memory_max_margin"]
        )
        left = frame["gpu.thermal_margin"] - np.nan_to_num(limits)
        certain = (step.effect >= _CERTAIN) & (step.score >= _CERTAIN_SUM) & ~step.moved
        on = (step.on | certain) & recent & real
        since = self.since[:n]
        since[:] = np.where(on, np.where(since > 0, np.minimum(since, time), time - step.held * SECOND), 0)
        return GpuHeat(frame, sample, step, nodes, index, on, doubted, throttled, left)

    # --- verdicts

    def _find_blamed(self, heat: GpuHeat, throttling: Bools, reported: Bools) -> dict[str, HeatVerdict]:
        """Returns entity -> verdict; GPUs of a unit that is to blame are not named too.

        throttling: (N,) GPUs of units that throttle as a whole: what makes them hot is not their own resistance or
        their node's, so only those reported before stay reported.   reported: (N,) GPUs of nodes that are.
        """
        named = self._find_nodes(heat)
        found = {name: v for name, v in named.items() if name in self.conditions or not throttling[v.gpus].all()}
        covered = reported.copy()
        for verdict in found.values():
            covered[verdict.gpus] = True
        for i in np.flatnonzero(((heat.on & ~heat.step.moved) | self.wearing[: len(covered)]) & ~covered).tolist():
            entity = heat.frame.entities[i]
            if not throttling[i] or entity in self.conditions:
                found[entity] = self._judge_gpu(heat, i)
        return found

    def _find_parts_of_reported(self, heat: GpuHeat) -> Bools:
        """Returns (N,) GPUs of nodes that are reported and still cool worse, measured at this instant or not."""
        nodes = [m for m in np.flatnonzero(heat.nodes.on).tolist() if heat.index.names[m] in self.conditions]
        return np.isin(heat.index.node, nodes)

    def _find_nodes(self, heat: GpuHeat) -> dict[str, HeatVerdict]:
        """Returns node or rack -> verdict where its GPUs moved together."""
        index, nodes = heat.index, heat.nodes
        members = dict[int, Times]()
        for m in np.flatnonzero(nodes.on & nodes.judged).tolist():
            members[m] = np.flatnonzero((index.node == m) & np.isfinite(heat.sample.lasting))
        moved = heat.on & heat.step.moved & (heat.step.off > 0)
        for m in np.unique(index.node[moved & (index.node >= 0)]).tolist():
            mine = np.flatnonzero((index.node == m) & heat.step.judged & (heat.step.off > 0) & ~heat.doubted)
            if len(mine) >= FEWEST and m not in members:
                members[m] = mine
        found, racks = dict[str, HeatVerdict](), dict[str, list[int]]()
        for m in members:
            racks.setdefault(index.rack[m], []).append(m)
        for rack, moved_nodes in racks.items():
            known = sum(bool(nodes.judged[m]) for m, name in enumerate(index.rack) if name == rack)
            if rack and len(moved_nodes) >= _LEAST_NODES and len(moved_nodes) >= MOST * known:
                gpus = np.concatenate([members.pop(m) for m in moved_nodes])
                found[rack] = self._judge_unit(heat, rack, moved_nodes, gpus)
        for m, gpus in members.items():
            if len(gpus) and not (nodes.on[m] and nodes.moved[m]):
                found[index.names[m]] = self._judge_unit(heat, index.names[m], [m], gpus)
        return found

    def _judge_unit(self, heat: GpuHeat, unit: str, nodes: list[int], gpus: Times) -> HeatVerdict:
        """Returns the verdict on a node or rack whose GPUs moved together."""
        shared = [m for m in nodes if heat.nodes.on[m] and heat.nodes.judged[m]]
        if shared:
            effect = float(np.median(heat.nodes.effect[shared]))
            held, score = int(heat.nodes.held[shared].max()), float(heat.nodes.score[shared].max())
        else:
            effect = float(np.median(heat.step.effect[gpus]))
            held, score = int(np.median(heat.step.held[gpus])), float(heat.step.score[gpus].max())
        worst = int(gpus[np.argmax(np.nan_to_num(heat.frame["gpu.temperature"][gpus]))])
        level = self._level(heat.is_hot(gpus), held, effect * float(np.nanmedian(heat.sample.rise[gpus])))
        part_of = "its branch of the loop" if unit.startswith("rack:") else "manifold, quick disconnect, fans or branch"
        names = sorted(heat.frame.entities[i] for i in gpus.tolist())
        more = {"gpus": names[:16], "verdict": f"what its GPUs share: {part_of} (its own flow is not measured)"}
        text = f"{len(gpus)} GPUs cool {_percent(effect)} worse{_describe(heat, worst)}"
        return self._verdict(heat, unit, worst, (level, held, score, effect), text, gpus, more)

    def _judge_gpu(self, heat: GpuHeat, i: int) -> HeatVerdict:
        """Returns the verdict on a single GPU: its plate, its paste, or its sensor where nothing else confirms it."""
        step, at = heat.step, np.array([i])
        minutes = self._minutes_left(heat, i) if heat.on[i] else None
        hot = heat.is_hot(at) or (minutes is not None and minutes <= self.near)
        text, more = "", {"minutes_to_limit": minutes, "verdict": "cold plate or thermal paste"}
        if heat.on[i]:
            effect, held = float(step.effect[i]), (heat.frame.time - int(self.since[i])) // SECOND
            harm = hot and (not step.alone[i] or bool(heat.throttled[i]))
            kelvin = float(heat.excess[i]) if effect >= self.delta else 0.0  # what fades opens no ticket
            level = self._level(harm, held, kelvin)
            how = "worse"
        else:
            _, grown = self.trends.test()
            effect, per_hour = float(np.nan_to_num(grown[i])), max(self.trends.slope(i), 1e-5)
            held = int(min(effect / per_hour * 3600, 60 * 86_400))
            level, how = "page" if heat.is_hot(at) else "ticket", "worse than when new"
            if heat.left[i] > 0 and np.isfinite(heat.sample.rise[i]):
                more["days_to_limit"] = days = round(float(heat.left[i] / (per_hour * 24 * heat.sample.rise[i])), 1)
                text = f", at its limit in {days:.0f} days"
        if heat.doubted[i]:
            level, more["verdict"] = "suspect", "its sensor: the memory on the same plate is not warmer"
        text = text or (f", at its limit in {minutes:.0f} min" if minutes is not None else "")
        title = f"cools {_percent(effect)} {how}{_describe(heat, i)}{text}"
        return self._verdict(
            heat, heat.frame.entities[i], i, (level, held, float(step.score[i]), effect), title, at, more
        )

    def _level(self, harm: bool, held: int, kelvin: float) -> Level:
        """Returns page with harm; else ticket once it is held and at least two steps of a thermometer."""
        if harm:
            return "page"
        return "ticket" if held >= self.patience and kelvin >= _LEAST_K else "suspect"  # not measured now: NaN

    def _minutes_left(self, heat: GpuHeat, i: int) -> float | None:
        """Returns minutes to its limit at the present slope; None if it does not warm, or its limit is not known."""
        left = float(heat.left[i])
        if not left > 0 or self.minutes.recent_z(i, _RISES) < _RISES_SURE:
            return None
        slope = self.minutes.slope(i, _RISES)
        return round(left / slope, 1) if slope > 0 else None

    def _verdict(
        self,
        heat: GpuHeat,
        entity: str,
        i: int,
        how_bad: tuple[Level, int, float, float],
        text: str,
        gpus: Times,
        more: dict[str, Any],
    ) -> HeatVerdict:
        """Returns a verdict with the evidence of its (hottest) GPU `i`. how_bad: level, s held, score, ln of R."""
        level, held, score, effect = how_bad
        now, excess = float(heat.frame["gpu.temperature"][i]), float(heat.sample.rise[i] * -np.expm1(-effect))
        compared = Comparison(
            now, now - excess, None, self._cohort(heat, i), max(int(heat.step.size[i]) - 1, 0), excess, "K"
        )
        more |= {"throttled": heat.is_hot(gpus), "resistance_up": round(float(np.expm1(effect)), 3)}
        more |= {"kelvin_left": _rounded(heat.left[i]), "reference": _rounded(heat.sample.reference[i])}
        clears = f"ends when it is less than {self.delta / 2:.0%} above its usual value at the same load"
        onset = heat.frame.time - held * SECOND
        return HeatVerdict(level, onset, pager_title(entity, text), clears, score, gpus, more, compared)

    def _cohort(self, heat: GpuHeat, i: int) -> str:
        return "own past" if heat.step.alone[i] else self._peers.cohort_name(heat.frame, i)

    def _find_unmeasured(self, heat: GpuHeat) -> Iterator[str]:
        """Yields GPUs and nodes with a condition that cannot be judged now, as while they idle: it is not over."""
        names, nodes = heat.index.names, heat.nodes
        yield from (names[m] for m in np.flatnonzero(nodes.on & ~nodes.judged).tolist())
        yield from (heat.frame.entities[i] for i in np.flatnonzero(heat.step.on & ~heat.step.judged).tolist())

    def _find_throttling(
        self, heat: GpuHeat, found: Mapping[str, HeatVerdict], members: Bools
    ) -> dict[str, HeatVerdict]:
        """Returns nodes and GPUs that report throttling and are not part of a verdict, or of a unit."""
        frame, n, streaks, node = heat.frame, len(heat.on), self.throttling, heat.index.node
        other = heat.throttled & ~members
        for verdict in found.values():
            other[verdict.gpus] = False
        recent = (self.normal_at[:n] > 0) & (frame.time - self.normal_at[:n] <= self.hold * SECOND)
        nodes = node, heat.index.names
        recurring = streaks.find_recurring(frame, self.conditions, recent | ~heat.step.judged)
        warm = self.resistance.warmer_references(heat.sample.reference) >= _WARM_K
        single = streaks.find_nodes_and_gpus(frame, other, heat.left, nodes, recent, warm, self.patience, self.hold)
        return {e: v for e, v in {**recurring, **single}.items() if e not in found}

    def _report(self, frame: Frame, found: Mapping[str, HeatVerdict]) -> Iterator[Finding]:
        """Yields the findings that are due now."""
        for entity, verdict in sorted(found.items()):
            if due := due_report(self.conditions, entity, frame.time, verdict.onset, verdict.level):
                yield self.finding(
                    *(frame.time, entity, due),
                    score=verdict.score,
                    summary=verdict.summary,
                    signals=self.needs,
                    clears=verdict.clears,
                    compared=verdict.compared,
                    **verdict.evidence,
                )


def _describe(heat: GpuHeat, i: int) -> str:
    """Returns how hot the (hottest) GPU is, if it is read at this instant."""
    now, power = float(heat.frame["gpu.temperature"][i]), float(heat.sample.power[i])
    warm = f", {now:.0f} °C at {power:.0f} W" if np.isfinite(now + power) else ""
    return f"{warm}, throttles" if heat.throttled[i] else warm


def _percent(effect: float) -> str:
    return f"{100 * np.expm1(effect):.0f} %"


def _rounded(value: float) -> float | None:
    return round(float(value), 1) if np.isfinite(value) else None
