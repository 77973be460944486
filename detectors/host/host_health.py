"""Finds hosts that will stop: memory or a file system that runs out, disks that wear out or fail, chassis faults.

Running out is a trend: the Theil-Sen slope (Sen 1968, Journal of the American Statistical Association 63, 1379-1389)
of the last 24 means, of a minute, ten minutes and two hours each, if Mann's test finds it steady.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part, parts
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.base.state import N, State, piece_of
from detectors.base.statistics import row_trend_z, theil_sen
from detectors.base.streams import Bools, Floats
from pipeline.model.entity_names import pager_title, short_duration, short_number
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

HOUR, DAY = 3600 * SECOND, 24 * 3600 * SECOND
SPANS = (60, 600, 7200)
"""s of one mean: 24 of them see a leak of an hour, of half a day and of a week."""
_MEANS, _LEAST = 24, 20  # means that are kept, and that must be there; chosen
_STEADY = 5.0
"""z of Mann's test on 24 means, 6.8 if each is lower than the one before: p = 3e-7, one in 400 node-years. Chosen."""
_FURTHER = 3.0  # times the time watched that a trend is extrapolated; chosen
_LOWER = _FURTHER / (1 + _FURTHER)  # share of its beginning to which such a trend has fallen
_CLEAR = 2.5  # z of its last third, 3.3 at most, from which that gives the slope: a leak may be newer; chosen
_GOES_ON = 0.5
"""Share of the whole slope that its last third must keep: a job that fills its buffers slows down, a leak does not."""
LOW = 0.4
CRITICAL = 0.15
"""Shares left above which a trend is no shortage yet, and does not page: fsSpaceFillingUpWarningThreshold and
fsSpaceFillingUpCriticalThreshold of the Prometheus node mixin."""
FULL = 0.03
"""Share left below which a file system is full: fsSpaceAvailableCriticalThreshold of the Prometheus node mixin."""
_LEAVES = 1.1  # times LOW above which a shortage is over immediately; chosen
_FORGETS_S = 7 * 86_400.0  # s in which the lowest level so far is forgotten; chosen: jobs of a week
_SHARED, _ALIKE = 3, 0.01
"""Nodes, and share left, by which file systems of one mount point and size are one that is shared; chosen."""
_HOLDS = 600 * SECOND  # us for which a shortage holds after it was found last: the quiet time of the Desk; chosen
SOON = 30 * DAY
"""us of rated life left from which a disk is to be replaced: what a spare part may take; chosen, as for spare rows."""
_LEAST_LIFE = 0.8  # share of the rated life used before its mean pace counts: a new disk is written otherwise; chosen
_RISES = 4
"""Newest rises of a disk's used life, by a hundredth each as the log rounds it, that give its pace now. Chosen."""
WASTED = 60 * DAY
"""us of rated life left at the pace now from which something wears the disk out: it is rated for years; chosen."""
LOOKS = 2
"""Readings in a row of a flag, or without it: one may be wrong."""
_LAPSES = 4 * HOUR  # us without a reading after which a flag is not known any more: 24 readings of 10 min; chosen
_DEAD = CATALOGUE["disk.state"].states.index("dead")
_REMAINS: Mapping[str, tuple[str, str, str]] = {
    # signal of the rest, or of the used part -> signal of the whole, class, in words
    "node.memory_available": ("node.memory_total", "node", "memory"),
    "filesystem.available": ("filesystem.total", "filesystem", "space"),
    "filesystem.files_used": ("filesystem.files_total", "filesystem", "inodes"),
}
_WARNINGS: Mapping[int, tuple[str, bool]] = {
    # bit of the critical warning -> in words, whether writes fail
    0x1: ("spare blocks below the threshold", False),
    0x2: ("temperature beyond its limits", False),
    0x4: ("reliability degraded by media errors", False),
    0x8: ("read-only, writes fail", True),
    0x10: ("backup of its cache failed", False),
}
"""NVM Express Base Specification 2.0, figure 207 (SMART / Health Information), byte 0."""
_CHASSIS = {0x1: "power overload", 0x4: "power fault", 0x8: "power control fault", 0x20: "drive fault"}
_CHASSIS |= {0x40: "cooling or fan fault"}
"""Bits of IPMI 2.0, section 28.2, Get Chassis Status, that are faults; 0x2 and 0x10 are doors and panels."""
DISK_FLAGS = (*_WARNINGS, "worn", "errors", "dead")


@dataclass
class Shortage(State):
    """The rest of a resource, as means of each of SPANS, and when it will be used up.

    left: (N,) seconds left by the span that gives the least, inf without a trend; as of the newest mean.
    A trend counts from a quarter below the lowest level before it only: each job may load its data steadily. As a trend
    is extrapolated to three times its length, it falls by that much.
    """

    sums: Floats = memory(0.0, shape=(len(SPANS), N))
    counts: Floats = memory(0.0, shape=(len(SPANS), N))
    means: Floats = memory(np.nan, shape=(len(SPANS), _MEANS, N))
    remains: Floats = memory(np.inf, shape=(len(SPANS), N))
    lowest: Floats = memory(np.nan, shape=(len(SPANS), N))  # of the means before those that are kept
    newest: list[int] = notes(lambda: [0] * len(SPANS))

    def add(self, values: Floats, whole: Floats, time: int) -> None:
        """Adds the rest, and judges the trends of which a mean is complete."""
        self.grow(len(values))
        n = len(values)
        for k, span in enumerate(SPANS):
            number = time // (span * SECOND)
            if number != self.newest[k]:
                if self.newest[k]:
                    self._close(k, number - self.newest[k], whole)
                self.newest[k] = number
        there = np.isfinite(values)
        self.sums[:, :n] += np.where(there, values, 0.0)
        self.counts[:, :n] += there

    def _close(self, k: int, steps: int, whole: Floats) -> None:
        """Completes a mean; steps: to the next one, more than one after a gap, below 0 if the clock was set back."""
        sums, counts, means = self.sums[k], self.counts[k], self.means[k]
        steps = min(abs(steps), _MEANS)
        lowest = self.lowest[k]
        lowest += (means[0] - lowest) * min(SPANS[k] * steps / _FORGETS_S, 1.0)
        np.fmin(lowest, np.fmin.reduce(means[:steps]), out=lowest)
        means[:-steps] = means[steps:]
        means[-steps:] = np.nan
        means[-steps] = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        sums[:] = counts[:] = 0.0
        self.remains[k] = np.inf
        if k == 0:
            self.remains[means[-1] * _LOWER > self.means[:, -1]] = np.inf  # free again
        n = len(whole)
        first, last = (np.nan_to_num(means[i, :n], nan=-np.inf) for i in (-_LEAST, -1))
        for i in np.flatnonzero((first > last) & (last < np.fmin(LOW * whole, _LOWER * lowest[:n]))).tolist():
            self.remains[k, i] = seconds_left(means[:, i], SPANS[k])

    def left(self, n: int) -> Floats:
        """Returns (N,) see the class."""
        return np.asarray(self.remains[:, :n].min(axis=0))

    def ends_within(self, n: int, seconds: float) -> Bools:
        """Returns (N,) whether nothing is left within `seconds`, by a trend that was watched for as long."""
        nearest = np.minimum(np.array(SPANS) * _LEAST, seconds)
        return np.asarray((self.remains[:, :n] < nearest[:, None]).any(axis=0))


def seconds_left(means: Floats, span: float) -> float:
    """Returns the time until a steady fall of means, `span` s apart, reaches 0; inf without one."""
    at = np.flatnonzero(np.isfinite(means))
    if len(at) < _LEAST or row_trend_z(means[None, :])[0] > -_STEADY:
        return float("inf")
    last = at[-_MEANS // 3 :]
    slope, late = theil_sen(at, means[at]), theil_sen(last, means[last])
    if slope >= 0 or late > _GOES_ON * slope:
        return float("inf")
    clear = row_trend_z(means[None, last])[0] <= -_CLEAR
    left = float(means[at[-1]] / -(late if clear else max(slope, late))) * span
    return left if left <= _FURTHER * len(means) * span else float("inf")


@dataclass
class Flags(State):
    """Some flags of each device, each believed after LOOKS readings in a row, and gone after as many without it."""

    count: int
    on: NDArray[np.int8] = memory(0, np.int8, shape=(len(DISK_FLAGS), N))
    off: NDArray[np.int8] = memory(0, np.int8, shape=(len(DISK_FLAGS), N))
    since: NDArray[np.int64] = memory(0, np.int64, shape=(len(DISK_FLAGS), N))
    read: NDArray[np.int64] = memory(0, np.int64, shape=(len(DISK_FLAGS), N))

    def update(self, row: int, flags: Bools, known: Bools, time: int) -> Bools:
        """Adds a reading of one flag; returns (N,) the devices that have it. known: whether it was read."""
        self.grow(n := len(flags))
        on, off, since, read = (cells[row, :n] for cells in (self.on, self.off, self.since, self.read))
        held = on >= LOOKS
        np.minimum(read, time, out=read)  # the clock may have been set back
        read[known] = time
        since[known & flags & (on == 0)] = time
        off[:] = np.where(known, np.where(flags, 0, np.minimum(off + 1, LOOKS)), off)
        on[known & flags] = np.minimum(on[known & flags] + 1, LOOKS)
        gone = (known & ~flags & (~held | (off >= LOOKS))) | (time - read > _LAPSES)
        on[gone] = 0
        return np.asarray(on >= LOOKS)


@dataclass
class Wear(State):
    """When the used life of each disk rose by a hundredth, newest last (us); a value that fell is another disk's."""

    level: Floats = memory(np.nan)
    rises: Floats = memory(np.nan, shape=(_RISES, N))

    def update(self, used: Floats, time: int) -> Floats:
        """Returns (N,) share of the rated life that is used in a us now; 0 before there are enough rises."""
        self.grow(n := len(used))
        level, rises, now = self.level[:n], self.rises[:, :n], np.floor(100 * used + 0.5)
        rises[:, now < level] = np.nan
        rose = now > level
        rises[:, rose] = np.vstack((rises[1:, rose], np.full(np.count_nonzero(rose), float(time))))
        np.copyto(level, now, where=np.isfinite(now))
        return np.asarray(np.nan_to_num(0.01 * (_RISES - 1) / np.maximum(time - rises[0], 1.0)))


@dataclass(frozen=True, slots=True)
class HostTrouble:
    """One thing that is wrong with an entity. harm: work is lost now or within the hour, if a job runs there.

    left: s until nothing is left.   share, whole: free share of a file system, and its size.
    """

    entity: str
    since: int
    harm: bool
    text: str
    signal: str
    left: float = float("inf")
    share: float = 1.0
    whole: float = 0.0


@dataclass
class HostHealth(Detector):
    """Hosts that will stop. Ticket: memory, or the space or inodes of a file system, that falls steadily and will be
    used up, with the time left; a file system that is 97 % full; an NVMe disk that warns, has new media errors, is
    dead, or whose rated life ends within 30 days, or within 60 at its pace of late; a chassis fault that the BMC
    reports. Page, where a job runs on the node: memory or space that is used up within the hour, a disk that is
    read-only or dead.

    A trend is steady if Mann's test says so and its last third goes on at half of the slope or more; it is extrapolated
    to three times the time for which it was watched, and pages only as far as it was watched. Shared file systems,
    which many nodes report alike, are one finding.

    Source: NVM Express Base Specification 2.0 (SMART / Health Information log); IPMI 2.0, Get Chassis Status; shares
    that are left from the Prometheus node mixin (fsSpaceFillingUpWarningThreshold, fsSpaceAvailableCriticalThreshold).

    horizon: s of time left below which it pages; the levels of all detectors: harm within the hour.
    """

    name: ClassVar[str] = "host_health"
    family: ClassVar[str] = "host"
    device_class: ClassVar[str] = "node"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = (
        *("node.memory_available", "filesystem.available", "disk.critical_warning", "disk.state"),
        "node.chassis_faults",
    )
    wants: ClassVar[tuple[str, ...]] = (
        *("node.memory_total", "filesystem.total", "filesystem.files_used", "filesystem.files_total"),
        "filesystem.read_only",
        *("disk.spare", "disk.spare_threshold", "disk.endurance_used", "disk.power_on_time", "disk.media_errors"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Memory that is used up within 20 minutes; a leak that each job starts again; memory limits of containers; "
        "wear of disks without an NVMe health log."
    )

    horizon: float = 3600.0

    trends: dict[str, Shortage] = parts(Shortage, kept=True)
    flags: Flags = part(lambda: Flags(len(DISK_FLAGS)), of="disk", kept=True)
    wear: Wear = part(Wear, of="disk", kept=True)
    chassis: Flags = part(lambda: Flags(1), kept=True)
    errors: dict[str, float] = notes()  # disk -> its media errors, as last read
    grown: dict[str, list[float]] = notes()  # disk -> when media errors grew last, and by how many since the onset
    short: dict[str, list[int]] = notes()  # entity and signal -> when a shortage began, and was found last
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        steady = f"trends of which a normal series shows one in 3 million, below {LOW:.0%} left"
        return [rule_line(f"{steady}, on health logs of disks and on faults that BMCs report")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        if (time := self.gates.update(frames)) is None:
            return []
        topology = next(iter(frames.values())).topology
        found = [*self._shortages(frames, time), *self._disks(frames.get("disk")), *self._faults(frames.get("node"))]
        if not found and not self.conditions:
            return []
        by_entity: dict[str, list[HostTrouble]] = {}
        for trouble in _without_copies(found):
            if not self.gates.in_maintenance(trouble.entity, topology, time):
                by_entity.setdefault(trouble.entity, []).append(trouble)
        missing = {"node", "disk", "filesystem"} - frames.keys()
        waiting = {e for e in self.conditions if e.partition(":")[0] in missing}
        close_ended(self.conditions, {*by_entity, *waiting})
        reports = ((e, mine, self._due(e, mine, topology, time)) for e, mine in sorted(by_entity.items()))
        return [self._finding(e, mine, time, due) for e, mine, due in reports if due is not None]

    def _due(self, entity: str, mine: Sequence[HostTrouble], topology: Topology, time: int) -> tuple[int, Level] | None:
        harm = any(t.harm for t in mine) and self._has_job(entity, topology)
        since = min(t.since for t in mine)
        return due_report(self.conditions, entity, time, since, "page" if harm else "ticket")

    def _has_job(self, entity: str, topology: Topology) -> bool:
        node = topology.ancestor_of_kind(entity, "node")
        return node is not None and any(self._jobs.job_on(g, topology) for g in self._jobs.gpus_of(node, topology))

    def _shortages(self, frames: Mapping[str, Frame], time: int) -> Iterator[HostTrouble]:
        """Yields what runs out, or is full."""
        for signal, (total, device_class, word) in _REMAINS.items():
            frame = frames.get(device_class)
            if frame is None or signal not in frame.values or total not in frame.values:
                continue
            whole = frame[total]
            rest = whole - frame[signal] if signal.endswith("_used") else frame[signal]
            trend = piece_of(self.trends, signal, Shortage)
            trend.add(rest, whole, time)
            left, ends = trend.left(len(rest)), trend.ends_within(len(rest), self.horizon)
            left = np.where(rest < _LEAVES * LOW * whole, left, np.inf)  # free again since its newest mean
            full = (rest < FULL * whole) & (whole > 0) & (device_class == "filesystem")
            full &= ~(frame["filesystem.read_only"] == 1) if full.any() else True
            for i in np.flatnonzero(np.isfinite(left) | full).tolist():
                known = self.short.setdefault(f"{frame.entities[i]}|{signal}", [time, time])
                known[1] = time
                seconds, share = float(left[i]), float(rest[i] / whole[i])
                harm = bool(ends[i]) and share < CRITICAL
                text = f"{share:.0%} {word} left"
                text += f", none in {short_duration(seconds)}" if np.isfinite(seconds) else ""
                yield HostTrouble(*(frame.entities[i], known[0], harm, text, signal, seconds, share, float(whole[i])))
        self.short = {key: known for key, known in self.short.items() if 0 <= time - known[1] <= _HOLDS}

    def _disks(self, frame: Frame | None) -> Iterator[HostTrouble]:
        """Yields disks that warn, are worn, lose data or are dead."""
        if frame is None or not frame.values:
            return
        n, time = len(frame.entities), frame.time
        warning, spare, used = (frame[f"disk.{name}"] for name in ("critical_warning", "spare", "endurance_used"))
        bits = np.nan_to_num(warning).astype(np.int64)
        hours, state = frame["disk.power_on_time"], frame["disk.state"]
        pace = np.where((used >= _LEAST_LIFE) & (hours > 0), used / np.maximum(hours, 1.0), 0.0)
        recent = self.wear.update(used, time)
        soon = (used >= 1) | ((1 - used) * HOUR < SOON * pace) | (1 - used < WASTED * recent)
        left = (1 - used) / np.maximum(np.maximum(pace / HOUR, recent), 1e-30) / SECOND
        self._count_errors(frame)
        lost = np.array([e in self.grown for e in frame.entities], bool)
        rows = [((bits & bit) > 0, ~np.isnan(warning), text, harm) for bit, (text, harm) in _WARNINGS.items()]
        below = np.asarray(spare < frame["disk.spare_threshold"])
        rows[0] = (rows[0][0] | below, rows[0][1] | ~np.isnan(spare), *rows[0][2:])
        rows.append((soon, ~np.isnan(used), "", False))
        rows.append((lost, np.ones(n, bool), "", False))
        rows.append((state == _DEAD, ~np.isnan(state), "dead", True))
        for row, (flags, known, text, harm) in enumerate(rows):
            on = self.flags.update(row, flags, known, time)
            for i in np.flatnonzero(on).tolist():
                entity, since = frame.entities[i], int(self.flags.since[row, i])
                text_of = {"worn": _wear(float(used[i]), float(left[i])), "errors": self._errors_text(entity)}
                words = text or text_of[str(DISK_FLAGS[row])]
                yield HostTrouble(entity, since, harm, words, _signal_of(row))

    def _count_errors(self, frame: Frame) -> None:
        """Records the growth of media errors; a count that fell is another disk's."""
        now = frame["disk.media_errors"]
        for i in np.flatnonzero(np.isfinite(now)).tolist():
            entity, count = frame.entities[i], float(now[i])
            before = self.errors.get(entity, count)
            if count > before:
                sum_before = self.grown.get(entity, [0.0, 0.0])[1]
                self.grown[entity] = [frame.time, sum_before + count - before]
            self.errors[entity] = count
        self.grown = {e: k for e, k in self.grown.items() if 0 <= frame.time - k[0] <= DAY}

    def _errors_text(self, entity: str) -> str:
        count = self.grown.get(entity, [0.0, 0.0])[1]
        return f"{short_number(count)} new media errors, data lost" if count else "new media errors"

    def _faults(self, frame: Frame | None) -> Iterator[HostTrouble]:
        """Yields nodes whose BMC reports a chassis fault."""
        if frame is None or "node.chassis_faults" not in frame.values:
            return
        mask = frame["node.chassis_faults"]
        bits = np.nan_to_num(mask).astype(np.int64)
        on = self.chassis.update(0, (bits & sum(_CHASSIS)) > 0, ~np.isnan(mask), frame.time)
        for i in np.flatnonzero(on).tolist():
            words = ", ".join(text for bit, text in _CHASSIS.items() if bits[i] & bit) or "chassis fault"
            since = int(self.chassis.since[0, i])
            yield HostTrouble(frame.entities[i], since, False, f"BMC reports {words}", "node.chassis_faults")

    def _finding(self, entity: str, mine: Sequence[HostTrouble], time: int, due: tuple[int, Level]) -> Finding:
        worst = min(mine, key=lambda t: (not t.harm, t.left))
        more = f" (+{len(mine) - 1} more)" if len(mine) > 1 else ""
        return self.finding(
            *(time, entity, due),
            score=2.0 if due[1] == "page" else 1.0,
            summary=pager_title(entity, worst.text + more),
            signals=tuple(dict.fromkeys(t.signal for t in mine)),
            clears="clears when the trend, the warning or the fault is gone",
            seconds_left=None if np.isinf(worst.left) else round(worst.left),
            troubles=[t.text for t in mine],
        )


def _wear(used: float, left: float) -> str:
    return f"{used:.0%} of its rated life used" + ("" if used >= 1 else f", {short_duration(left)} left")


def _signal_of(row: int) -> str:
    named = {"worn": "disk.endurance_used", "errors": "disk.media_errors", "dead": "disk.state"}
    return named.get(str(DISK_FLAGS[row]), "disk.critical_warning")


def _without_copies(found: Sequence[HostTrouble]) -> Iterator[HostTrouble]:
    """Yields troubles; of a file system that several nodes report alike only the oldest one, with their number."""
    alike: dict[tuple[object, ...], list[HostTrouble]] = {}
    for each in found:
        mount = each.entity.partition(".")[2] if each.entity.startswith("filesystem:") else ""
        alike.setdefault((mount, each.signal, each.whole) if mount else (id(each),), []).append(each)
    for same in alike.values():
        shares = [each.share for each in same]
        if len(same) < _SHARED or max(shares) - min(shares) > _ALIKE:
            yield from same
            continue
        first = min(same, key=lambda t: (t.since, t.entity))
        yield replace(first, text=f"{first.text}, on {len(same)} nodes", left=min(t.left for t in same))
