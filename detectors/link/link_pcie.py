"""Finds PCIe links of GPUs and NICs that run with fewer lanes or slower than they did or their like do, or that err."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_number, read_text
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.kernel import compiled
from detectors.base.statistics import grouped_median
from detectors.link.alarm_rates import LINKS, RULES, of_sum
from detectors.link.best_values import CONFIRM, Best
from detectors.link.poisson_cusum import Tallies
from pipeline.model.records import SECOND, Finding, Frame, Level

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Said = dict[str, dict[str, Any]]

_REPLAYS = ("gpu.pcie_replays",)
_COHORT = 8  # devices alike below which a median says little
_KEEP = 0.8  # share of idle GPUs alike that keep their generation; chosen: of eight, one may be broken
_LOOK = 600 * SECOND  # between two looks at what was always below its like: nothing about it is urgent
_AER_NEWS = 1800 * SECOND  # so long an AER event is told beside a link that fell; chosen
_IDLE = 1800 * SECOND  # idle for so long, a GPU that saves power does so; it does within seconds. Chosen
_UNITS = {"width": "lanes", "generation": "as generation", "speed": "GT/s a lane"}


@dataclass
class LinkPcie(Detector):
    """PCIe width of GPUs and NICs at any time, their speed under load: an idle GPU lowers its generation to save power.

    Page: fewer lanes than the device has held, three samples running, or a lower generation while it works at
    `busy` or more, or has been idle for half an hour among idle ones alike that keep theirs. Ticket: the same if it
    has not been at its best since new software or firmware of the last day, which may want it so; a device that has had
    less than its like since it was first seen; or packets sent again (replays) at the rate that breaks PCIe's error
    budget, in two windows of a minute. Suspect: one burst of replays.
    Blamed is the GPU or the NIC's port; slot, riser and device cannot be told apart. AER events are told beside it.

    Source: replays above 1.92 a minute and lane are beyond a bit error rate of 1e-12 at generation 5 (DCGM's health
    check; 16 lanes: 1,843 an hour) against 10 an hour (chosen). NVML: the generation is lower while the GPU is idle.
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
        "Which of slot, riser and device it is; a generation that fell while the GPU is idle, until it works, where"
        " idle ones lower theirs too; and devices that were too narrow at first and have fewer than seven alike."
    )

    busy: float = 0.5
    healthy_replays: float = 10.0
    faulty_replays: float = 1843.0
    limit: float = 23.0

    idle: NDArray[np.int64] = memory(0, np.int64)
    gpu_width: Best = part(Best)
    gpu_generation: Best = part(Best)
    nic_width: Best = part(Best)
    nic_speed: Best = part(Best)
    replays: Tallies = part(lambda: Tallies(_REPLAYS, 10.0, 1843.0, window=60.0))
    gates: Gates = part(Gates)
    aer: Said = notes()
    lesser: Said = notes()
    looked: dict[str, int] = notes()
    conditions: OpenConditions = notes()
    _peers: dict[str, Peers] = field(
        default_factory=lambda: {c: Peers(("@sku",), ("@board_id",), ("@name",)) for c in ("gpu", "nic")},
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        self.replays.healthy, self.replays.faulty = self.healthy_replays, self.faulty_replays
        self.replays.limit = self.limit

    def budget(self) -> list[str]:
        sums = of_sum(self.limit, self.replays.window, LINKS)
        return [f"replays, {sums}", f"width and speed: {RULES}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        self.gates.update(frames)
        time = max(frame.time for frame in frames.values())
        self._hear(frames, time)
        troubles: dict[str, list[dict[str, Any]]] = {}
        for device_class, frame in (("gpu", frames.get("gpu")), ("nic", frames.get("nic"))):
            if frame is not None and len(frame.entities):
                self._of_class(device_class, frame, troubles)
        quiet = {e for e in self.conditions if not self._shown(e, frames)}  # nothing is known of them at this instant
        close_ended(self.conditions, {*troubles, *quiet})
        found = (self._finding(e, time, mine, frames) for e, mine in sorted(troubles.items()))
        return [finding for finding in found if finding is not None]

    def _shown(self, entity: str, frames: Mapping[str, Frame]) -> bool:
        return ("gpu" if entity.startswith("gpu:") else "nic") in frames

    def _hear(self, frames: Mapping[str, Frame], time: int) -> None:
        """Keeps the newest AER event of each node for a while."""
        for event in (e for frame in frames.values() for e in frame.events if e.kind == "aer"):
            told = {name: read_text(event.data.get(name)) for name in ("device", "kind")}
            errors = event.data.get("errors")
            counted = {str(e)[:40]: read_number(n) for e, n in errors.items()} if isinstance(errors, Mapping) else {}
            more = {"growth": read_number(event.data.get("growth")), "errors": counted}
            self.aer[event.entity] = {"time": event.time, **told, **more}
        for node in [n for n, told in self.aer.items() if time - told["time"] > _AER_NEWS]:
            del self.aer[node]

    def _of_class(self, device_class: str, frame: Frame, troubles: dict[str, list[dict[str, Any]]]) -> None:
        """Judges the links of one class; adds what is wrong, by entity."""
        watched = self._watched(device_class, frame)
        for what, best, loaded in watched:
            signal = f"{device_class}.pcie_{what}"
            if signal not in frame.values and not len(best.best):
                continue
            best.step(frame[signal], loaded, frame.time)
            below = best.below(frame.time)
            for i in np.flatnonzero(below & best.learnt(len(below))).tolist() if below.any() else ():
                if not self.gates.in_maintenance(frame.entities[i], frame.topology, frame.time):
                    troubles.setdefault(frame.entities[i], []).append(self._fell(frame, i, what, best, signal))
        if frame.time - self.looked.get(device_class, 0) >= _LOOK or frame.time < self.looked.get(device_class, 0):
            self.looked[device_class] = frame.time
            self._look(device_class, frame, watched)
        for entity, told in self.lesser.items():
            if told["class"] == device_class:
                troubles.setdefault(entity, []).append(told)
        if device_class == "gpu":
            self._count(frame, troubles)

    def _watched(self, device_class: str, frame: Frame) -> list[tuple[str, Best, Bools]]:
        """What is watched of a class: its state, and when a low value says something."""
        always = np.ones(len(frame.entities), bool)
        if device_class == "gpu":
            return [("width", self.gpu_width, always), ("generation", self.gpu_generation, self._telling(frame))]
        up = ~(frame["nic.state"] == 0)
        return [("width", self.nic_width, always), ("speed", self.nic_speed, up)]

    def _telling(self, frame: Frame) -> Bools:
        """(N,) GPUs whose generation says something: at work, or idle among idle ones that keep theirs all the same."""
        n, load = len(frame.entities), frame["gpu.utilization"]
        self.grow(n)
        idle = self.idle[:n]
        idle_since(load, self.busy, idle, frame.time)
        telling = load >= self.busy
        now, best = frame["gpu.pcie_generation"], self.gpu_generation.best[:n]
        if len(best) < n:
            return np.asarray(telling)
        below = (now < best) & (idle > 0) & (frame.time - idle >= _IDLE)
        if not below.any():
            return np.asarray(telling)
        long = (idle > 0) & (frame.time - idle >= _IDLE) & np.isfinite(now)
        groups = self._peers["gpu"].groups(frame)
        below &= groups >= 0
        size = np.bincount(groups[long] + 1, minlength=1 + int(groups.max(initial=0)) + 1)
        for once in np.unique(best[below]).tolist():  # generations: a handful
            keep = np.bincount(groups[long & (now >= once)] + 1, minlength=len(size))
            most = (size >= _COHORT) & (keep >= _KEEP * size)
            telling |= below & (best == once) & most[groups + 1]
        return np.asarray(telling)

    def _fell(self, frame: Frame, i: int, what: str, best: Best, signal: str) -> dict[str, Any]:
        """A link that does less than it did."""
        changed = self.gates.last_change(frame.entities[i], frame.topology)
        since = best.since(i)
        level: Level = "ticket" if changed is not None and changed >= best.whole(i) else "page"
        now, before = float(best.newest[i]), float(best.best[i])
        words = f"has {now:g} {_UNITS[what]}, had {before:g}"
        words = f"runs {_UNITS[what]} {now:g}, was {before:g}" if what == "generation" else words
        compared = Comparison(now, before, None, "own past", 0, 1 - now / before, "share")
        told = {"level": level, "since": since, "text": words, "compared": compared.as_evidence()}
        return {**told, "signal": signal, "score": 2.0}

    def _look(self, device_class: str, frame: Frame, watched: list[tuple[str, Best, Bools]]) -> None:
        """Devices that have had less than their like since they were first seen."""
        self.lesser = {e: told for e, told in self.lesser.items() if told["class"] != device_class}
        groups = self._peers[device_class].groups(frame)
        for what, best, _ in watched:
            n = len(best.best)
            values = np.where(best.judged(n) & best.present(frame.time), best.best, np.nan)
            usual, size = grouped_median(np.where(values > 0, values, np.nan), groups[:n])
            for i in np.flatnonzero((values < usual) & (size >= _COHORT)).tolist():
                cohort = self._peers[device_class].cohort_name(frame, i)
                now, peers = float(values[i]), int(size[i]) - 1
                words = f"has never had more than {now:g} {_UNITS[what]}, {peers} alike have {usual[i]:g}"
                compared = Comparison(now, float(usual[i]), None, cohort, peers, float(1 - now / usual[i]), "share")
                told = {"level": "ticket", "since": frame.time, "text": words, "compared": compared.as_evidence()}
                more = {"score": 1.0, "signal": f"{device_class}.pcie_{what}", "class": device_class}
                self.lesser[frame.entities[i]] = told | more

    def _count(self, frame: Frame, troubles: dict[str, list[dict[str, Any]]]) -> None:
        """Replays beyond the error budget of PCIe."""
        n = len(frame.entities)
        self.replays.step(frame, lambda: ~self.gates.maintenance_mask(frame) & self.gpu_width.learnt(n))
        for i in np.flatnonzero(self.replays.suspect(n)).tolist():
            count = self.replays.counted(i).get(_REPLAYS[0], 0)
            level: Level = "ticket" if self.replays.alarm(n)[i] else "suspect"
            score = float(self.replays.padded(n)[i]) / self.limit
            words = f"has sent {count} PCIe packets again"
            told = {"level": level, "since": int(self.replays.since[i]), "text": words, "compared": None}
            troubles.setdefault(frame.entities[i], []).append({**told, "signal": _REPLAYS[0], "score": score})

    def _finding(
        self, entity: str, time: int, mine: list[dict[str, Any]], frames: Mapping[str, Frame]
    ) -> Finding | None:
        """One finding per device, the worst first."""
        order = {"page": 0, "ticket": 1, "suspect": 2}
        mine = sorted(mine, key=lambda t: (order[t["level"]], -t["score"]))
        worst = mine[0]
        due = due_report(self.conditions, entity, time, min(t["since"] for t in mine), worst["level"])
        if due is None:
            return None
        frame = next(iter(frames.values()))
        node = frame.topology.ancestor_of_kind(entity, "node") or ""
        beside = self.aer.get(node)
        words = " and ".join(t["text"] for t in mine)
        summary = f"{entity} {words}" + (f"; its node told of {beside['kind'] or 'some'} PCIe errors" if beside else "")
        facts: dict[str, Any] = {"aer": {k: v for k, v in beside.items() if k != "time"}} if beside else {}
        facts |= {"confirmed_samples": CONFIRM} if worst["compared"] is not None else {}
        clears = "the link is back at what it did, or as good as its like, for one sample"
        clears = clears if worst["compared"] is not None else "no PCIe packet sent again for some minutes"
        signals = tuple(dict.fromkeys(t["signal"] for t in mine))
        return Finding(
            *(time, due[0], entity, self.name, due[1], worst["score"], summary),
            make_evidence(clears, None, **(worst["compared"] or {}), **facts),
            signals,
        )


@compiled
def idle_since(load: Floats, busy: float, idle: NDArray[np.int64], time: int) -> None:
    """Since when each device has been idle; 0: it is at work. Who does not tell stays as it was."""
    for i in range(len(load)):
        if load[i] < busy:
            if idle[i] == 0:
                idle[i] = time
        elif np.isfinite(load[i]):
            idle[i] = 0
