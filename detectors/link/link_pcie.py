"""Finds PCIe links of GPUs and NICs with fewer lanes or less speed than before or than their peers, or with replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts, Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import events_of, read_number, read_text
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.statistics import grouped_median
from detectors.link.alarm_rates import PORTS_PER_NODE, RULE, describe_cusum_rate
from detectors.link.best_values import CONFIRM_SAMPLES, BestValues
from detectors.link.counters import pair_numbers
from detectors.link.poisson_cusum import PoissonCusum
from pipeline.model.entity_names import pager_title, short_number
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
EntityFacts = dict[str, dict[str, Any]]

_REPLAYS = ("gpu.pcie_replays",)
_MIN_COHORT = 8  # similar devices from which a median counts
_COMPARE_EVERY = 600 * SECOND  # us between two comparisons with peers: a value that was always lower is not urgent
_AT_REST = 600 * SECOND  # us without load after which a slower link slows no job: twice the longest pause. Chosen
_AER_LIFETIME = 1800 * SECOND  # us for which an AER event is shown beside a link that lost lanes or speed; chosen
_AER_BESIDE = 300 * SECOND  # us between replays and an AER event of the same errors: the agent's cooldown of events
_MAX_ERROR_NAME = 40  # characters of a name of an AER error
_UNITS = {"width": "PCIe lanes", "generation": "PCIe generation", "speed": "GT/s per PCIe lane"}
_ORDER = {"page": 0, "ticket": 1, "suspect": 2}


@dataclass
class LinkPcie(Detector):
    """PCIe width of GPUs and NICs at any time, their speed under load: an idle GPU lowers its generation to save power.

    Page: fewer lanes than the device has held, three samples in a row, or a lower generation while its utilization is
    `busy` or more; only what it held under load itself is compared, never other GPUs, which may be at work. Ticket: the
    same of a GPU that has been idle for ten minutes, or if it has not been at its best since new software or firmware
    of the last day, which may cause it; a device that has had less than its peers, and than those of its node, since it
    was first seen; or packets sent again (replays) at the rate that breaks PCIe's error budget, in two windows of a
    minute, or in one if its node has an AER event then. Suspect: one burst of replays. A lower value is the normal one
    after a day. The cause is the GPU or the NIC's port; slot, riser and device look the same. The evidence has the
    node's AER events.

    Source: replays above 1.92 per minute and lane are beyond a bit error rate of 1e-12 at generation 5 (DCGM's health
    check; 16 lanes: 1,843 per hour) against 10 per hour (chosen). NVML: the generation is lower while the GPU is idle.
    """

    name: ClassVar[str] = "link_pcie"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.pcie_width",)
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.pcie_generation", "gpu.utilization", "gpu.generation", *_REPLAYS),
        *("nic.pcie_width", "nic.pcie_speed", "nic.state"),
        *("event:aer", "event:version", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Which of slot, riser and device it is; a lower generation of an idle GPU; devices that have too few lanes as"
        " all of their node have; and devices with too few lanes from the start and fewer than seven peers."
    )

    busy: float = 0.5
    healthy_replays: float = 10.0
    faulty_replays: float = 1843.0
    limit: float = 23.0

    idle_since: NDArray[np.int64] = memory(0, np.int64)
    gpu_width: BestValues = part(BestValues, kept=True)
    gpu_generation: BestValues = part(BestValues, kept=True)
    nic_width: BestValues = part(BestValues, of="nic", kept=True)
    nic_speed: BestValues = part(BestValues, of="nic", kept=True)
    replays: PoissonCusum = part(lambda: PoissonCusum(_REPLAYS, 10.0, 1843.0, window=60.0), kept=True)
    gates: Gates = part(Gates)
    aer: EntityFacts = notes()  # node -> its newest AER event
    below_peers: EntityFacts = notes()  # device -> its trouble
    compared_at: dict[str, int] = notes()  # device class -> when it was compared with peers
    conditions: OpenConditions = notes()
    _node: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)
    _peers: dict[str, Peers] = field(
        default_factory=lambda: {c: Peers(("@sku",), ("@board_id",), ("@name",)) for c in ("gpu", "nic")},
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        self.replays.healthy, self.replays.faulty = self.healthy_replays, self.faulty_replays
        self.replays.limit = self.limit

    def budget(self) -> list[str]:
        """Returns the false alarm rate of its test of replays."""
        sums = describe_cusum_rate(self.limit, self.replays.window, PORTS_PER_NODE)
        return [f"replays, {sums}", f"width and speed: {RULE}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of GPUs and ports of NICs."""
        if not frames:
            return []
        self.gates.update(frames)
        time = max(frame.time for frame in frames.values())
        self._update_aer(frames, time)
        troubles: dict[str, list[dict[str, Any]]] = {}
        for device_class, frame in (("gpu", frames.get("gpu")), ("nic", frames.get("nic"))):
            if frame is not None and len(frame.entities):
                self._judge_class(device_class, frame, troubles)
        unknown = {e for e in self.conditions if not self._has_frame(e, frames)}  # at this instant
        close_ended(self.conditions, {*troubles, *unknown})
        found = (self._finding(e, time, mine, frames) for e, mine in sorted(troubles.items()))
        return [finding for finding in found if finding is not None]

    def _has_frame(self, entity: str, frames: Mapping[str, Frame]) -> bool:
        return ("gpu" if entity.startswith("gpu:") else "nic") in frames

    def _update_aer(self, frames: Mapping[str, Frame], time: int) -> None:
        """Keeps the newest AER event of each node for a while."""
        for event in events_of(frames, "aer"):
            facts = {name: read_text(event.data.get(name)) for name in ("device", "kind")}
            errors = event.data.get("errors")
            counted = (
                {str(e)[:_MAX_ERROR_NAME]: read_number(n) for e, n in errors.items()}
                if isinstance(errors, Mapping)
                else {}
            )
            more = {"growth": read_number(event.data.get("growth")), "errors": counted}
            self.aer[event.entity] = {"time": event.time, **facts, **more}
        for node in [n for n, known in self.aer.items() if time - known["time"] > _AER_LIFETIME]:
            del self.aer[node]

    def _judge_class(self, device_class: str, frame: Frame, troubles: dict[str, list[dict[str, Any]]]) -> None:
        """Adds the troubles of the devices of one class, by entity."""
        watched = self._watched_values(device_class, frame)
        for what, best, judged in watched:
            signal = f"{device_class}.pcie_{what}"
            if signal not in frame.values and not len(best.best):
                continue
            best.update(frame[signal], judged, frame.time)
            below = best.below_best(frame.time)
            for i in np.flatnonzero(below & best.has_enough_samples(len(below))).tolist() if below.any() else ():
                if not self.gates.in_maintenance(frame.entities[i], frame.topology, frame.time):
                    troubles.setdefault(frame.entities[i], []).append(self._describe_drop(frame, i, what, best, signal))
        if not 0 <= frame.time - self.compared_at.get(device_class, 0) < _COMPARE_EVERY:
            self.compared_at[device_class] = frame.time
            self._compare_with_peers(device_class, frame, watched)
        for entity, trouble in self.below_peers.items():
            if trouble["class"] == device_class:
                troubles.setdefault(entity, []).append(trouble)
        if device_class == "gpu":
            self._add_replays(frame, troubles)

    def _watched_values(self, device_class: str, frame: Frame) -> list[tuple[str, BestValues, Bools]]:
        """Returns name, state and (N,) mask of where a low value counts, of each watched value of a class."""
        always = np.ones(len(frame.entities), bool)
        if device_class == "gpu":
            self._update_idle(frame)
            return [
                ("width", self.gpu_width, always),
                ("generation", self.gpu_generation, frame["gpu.utilization"] >= self.busy),
            ]
        up = ~(frame["nic.state"] == 0)
        return [("width", self.nic_width, always), ("speed", self.nic_speed, up)]

    def _update_idle(self, frame: Frame) -> None:
        """Notes since when each GPU has been idle; one without a reading stays as it was."""
        load = frame["gpu.utilization"]
        self.grow(len(load))
        idle = self.idle_since[: len(load)]
        idle[(load < self.busy) & (idle == 0)] = frame.time
        idle[load >= self.busy] = 0

    def _describe_drop(self, frame: Frame, i: int, what: str, best: BestValues, signal: str) -> dict[str, Any]:
        """Returns the trouble of a link that is below its best."""
        changed = self.gates.last_change(frame.entities[i], frame.topology)
        waits = frame.device_class == "gpu" and self.idle_since[i] > 0 and frame.time - self.idle_since[i] >= _AT_REST
        level: Level = "ticket" if waits or (changed is not None and changed >= best.last_at_best(i)) else "page"
        now, before = float(best.newest[i]), float(best.best[i])
        amount = f"{_UNITS[what]} {now:g}" if what == "generation" else f"{now:g} {_UNITS[what]}"
        compared = Comparison(now, before, None, "own past", 0, 1 - now / before, "share")
        trouble = {"level": level, "since": best.fell_at(i), "title": f"{amount}, was {before:g}"}
        return {**trouble, "compared": compared.as_evidence(), "signal": signal, "score": 2.0}

    def _compare_with_peers(
        self, device_class: str, frame: Frame, watched: list[tuple[str, BestValues, Bools]]
    ) -> None:
        """Finds devices that have had less than their peers since they were first seen."""
        self.below_peers = {e: t for e, t in self.below_peers.items() if t["class"] != device_class}
        groups = self._peers[device_class].groups(frame)
        for what, best, _ in watched:
            n = len(best.best)
            values = np.where(best.has_enough_judged(n) & best.reported_recently(frame.time), best.best, np.nan)
            usual, size = grouped_median(np.where(values > 0, values, np.nan), groups[:n])
            here, beside = grouped_median(values, pair_numbers(self._node.groups(frame)[:n], groups[:n]))
            low = (values < usual) & (size >= _MIN_COHORT) & ((values < here) | (beside < 2))
            for i in np.flatnonzero(low).tolist():
                cohort = self._peers[device_class].cohort_name(frame, i)
                now, peers = float(values[i]), int(size[i]) - 1
                amount = f"{_UNITS[what]} {now:g}" if what == "generation" else f"{now:g} {_UNITS[what]}"
                compared = Comparison(now, float(usual[i]), None, cohort, peers, float(1 - now / usual[i]), "share")
                trouble = {"level": "ticket", "since": frame.time, "title": f"never above {amount}, peers {usual[i]:g}"}
                more = {"score": 1.0, "signal": f"{device_class}.pcie_{what}", "class": device_class}
                self.below_peers[frame.entities[i]] = trouble | {"compared": compared.as_evidence()} | more

    def _add_replays(self, frame: Frame, troubles: dict[str, list[dict[str, Any]]]) -> None:
        """Adds replays beyond the error budget of PCIe."""
        n = len(frame.entities)
        self.replays.update(frame, lambda: ~self.gates.maintenance_mask(frame) & self.gpu_width.has_enough_samples(n))
        for i in np.flatnonzero(self.replays.is_suspect(n)).tolist():
            count = self.replays.errors_by_counter(i).get(_REPLAYS[0], 0)
            since = int(self.replays.since[i])
            logged = self._node_logged_errors(frame, i, since)
            level: Level = "ticket" if logged or self.replays.is_alarm(n)[i] else "suspect"
            score = float(self.replays.sums_of(n)[i]) / self.limit
            trouble: dict[str, Any] = {"level": level, "since": since, "compared": None}
            trouble |= {"title": f"{short_number(count)} PCIe replays", "signal": _REPLAYS[0], "score": score}
            troubles.setdefault(frame.entities[i], []).append(trouble)

    def _node_logged_errors(self, frame: Frame, i: int, since: int) -> bool:
        """Returns whether the node of a device reported PCIe errors when its replays began."""
        aer = self.aer.get(frame.topology.ancestor_of_kind(frame.entities[i], "node") or "")
        return aer is not None and abs(aer["time"] - since) <= _AER_BESIDE

    def _finding(
        self, entity: str, time: int, mine: list[dict[str, Any]], frames: Mapping[str, Frame]
    ) -> Finding | None:
        """Returns the finding of a device, if one is due; its worst trouble comes first."""
        mine = sorted(mine, key=lambda t: (_ORDER[t["level"]], -t["score"]))
        worst = mine[0]
        due = due_report(self.conditions, entity, time, min(t["since"] for t in mine), worst["level"])
        if due is None:
            return None
        frame = next(iter(frames.values()))
        aer = self.aer.get(frame.topology.ancestor_of_kind(entity, "node") or "")
        evidence: dict[str, Any] = {"aer": {k: v for k, v in aer.items() if k != "time"}} if aer else {}
        clears = "no PCIe replay for some minutes"
        if worst["compared"] is not None:
            evidence |= {"confirmed_samples": CONFIRM_SAMPLES, **worst["compared"]}
            clears = "the link is as before, or as its peers are, for one sample"
        return self.finding(
            *(time, entity, due),
            score=worst["score"],
            summary=pager_title(entity, ", ".join(t["title"] for t in mine)),
            signals=tuple(dict.fromkeys(t["signal"] for t in mine)),
            clears=clears,
            **evidence,
        )
