"""Finds optics that will fail: raw bit errors that rise, hot modules, falling received light. Tickets only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.statistics import grouped_mad, grouped_median
from detectors.link.alarm_rates import PORTS_PER_NODE, describe_trend_rate
from detectors.link.optic_history import HOUR, HOURS, OpticHistory, Trend, fit_trend, row_median
from pipeline.model.entity_names import pager_title
from pipeline.model.records import Finding, Frame, iso

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Verdicts = dict[str, dict[str, Any]]

_BER = ("nic.phy_corrected_bits", "nic.phy_bits")
_MODULE_SIGNAL = {"hot": "nic.module_temperature", "dark": "nic.rx_power_min"}
_ERROR_REASONS = ("rising", "high")
_RECENT_HOURS, _MIN_PAST_HOURS = 3, 12  # h that are the present; h before them that are enough for a past. Chosen
_MIN_COHORT = 8  # ports from which a median counts: the bad one would be half of a smaller cohort
_MIN_DECADES = 1.0  # above peers or past: healthy ports of a cohort differ by less; chosen
_NORMAL = 1.4826  # median absolute deviation to standard deviation of a normal distribution
_OUTLIER_DEVIATIONS = 3.0  # standard deviations of the cohort; chosen: 1 in 740 of normal ports is beyond them
_CLEAR_DEVIATIONS = 6.0  # standard deviations around the line that a rise must exceed; chosen
_SILENT_FOR = 48 * HOUR  # us that a ticket stays open without a reading: as long as the history; chosen
_MIN_SAMPLES = 20  # slots before a port is judged: the replay contract
_FAR_FORECAST_DAYS = 60  # a longer forecast is not shown; chosen


@dataclass(frozen=True)
class OpticComparison:
    """All ports at the end of an hour. log10 of raw BER, degrees C and dBm; NaN where nothing was measured.

    series: (N, 48) log10 of the raw BER, less what all of its cohort did.
    recent: (N,) median of the last three hours.  past: (N,) that of the hours before.
    centre, spread, size: (N,) of the cohort's recent values.
    newest, change: of `heat` and `light`: now, and harm against the own past less that of the cohort.
    warmer: (N,) K above the median module of the cohort; NaN without one.
    """

    series: Floats
    raw: NDArray[np.float32]
    recent: Floats
    past: Floats
    centre: Floats
    spread: Floats
    size: NDArray[np.int64]
    newest: Mapping[str, Floats]
    change: Mapping[str, Floats]
    warmer: Floats

    @classmethod
    def compare(cls, history: OpticHistory, groups: NDArray[np.int32]) -> OpticComparison:
        """Returns the comparison of all ports. groups: (N,) cohort of each port."""
        raw = history.hourly_medians("ber")[: len(groups)]
        recent, past = row_median(raw[:, -_RECENT_HOURS:]), _past(raw)
        centre, size = grouped_median(recent, groups)
        spread, _ = grouped_mad(recent, groups)
        newest, change = {}, {}
        for kind, sign in (("heat", 1.0), ("light", -1.0)):
            hours = history.hourly_medians(kind)[: len(groups)]
            newest[kind] = row_median(hours[:, -_RECENT_HOURS:])
            moved = sign * (newest[kind] - _past(hours))
            common, peers = grouped_median(moved, groups)
            change[kind] = moved - np.where((peers >= _MIN_COHORT) & np.isfinite(common), common, 0.0)
        usual, modules = grouped_median(newest["heat"], groups)
        warmer = np.where(modules >= _MIN_COHORT, newest["heat"] - usual, np.nan)
        of_errors = _without_common(raw, groups), raw, recent, past, centre, _NORMAL * spread, size
        return cls(*of_errors, newest, change, warmer)

    def find_candidates(self, high: float, limit: float, horizon: float, slope: float, hours: int) -> Bools:
        """Returns (N,) ports to judge in full: high, or with halves that differ by most of what crosses the limit."""
        half = hours // 2
        late, early = row_median(self.series[:, -half:]), row_median(self.series[:, -2 * half : -half])
        speed = (late - early) / half * 24
        required = np.maximum(slope, (limit - self.recent) / horizon)
        rises = (speed > 0.6 * required) & (self.recent < limit)  # false for NaN
        return np.asarray(rises | (self._count_high_hours(high) >= _RECENT_HOURS))

    def is_high(self, i: int, high: float, limit: float) -> bool:
        """Returns whether a port is high for three hours, and far from its peers; without peers, from its own past.

        A link that works beyond the limit has a stronger FEC, and where its peers differ by much it is similar to some.
        """
        spread = self.spread[i] if self.size[i] >= _MIN_COHORT else 0.0
        far = self.decades_above_peers(i) >= max(_MIN_DECADES, _OUTLIER_DEVIATIONS * spread)
        return bool(self._count_high_hours(high)[i] >= _RECENT_HOURS and far and self.recent[i] < limit)

    def decades_above_peers(self, i: int) -> float:
        """Returns decades above its peers; without peers, above its own past. NaN: neither is known."""
        other = self.centre[i] if self.size[i] >= _MIN_COHORT else self.past[i]
        return float(self.recent[i] - other)

    def high_since(self, i: int, high: float) -> int:
        """Returns the index of the first of the last hours that are high."""
        low = np.flatnonzero(~(self.raw[i] > np.log10(high)))
        return int(low[-1]) + 1 if len(low) else 0

    def _count_high_hours(self, high: float) -> NDArray[np.int64]:
        """Returns (N,) how many of the last three hours are high."""
        return np.asarray((self.raw[:, -_RECENT_HOURS:] > np.log10(high)).sum(axis=1))

    def is_clear(self, found: Trend) -> bool:
        """Returns whether a series has risen by more than it varies."""
        return found.slope * found.hours / 24 > _CLEAR_DEVIATIONS * found.spread

    def find_hot(self, limit: float, rise: float) -> Bools:
        """Returns (N,) modules hotter than `limit` and than their peers, or than they were while their peers are as
        they were: where all modules are hot, the room is."""
        return np.asarray(((self.newest["heat"] > limit) & ~(self.warmer < rise / 2)) | (self.change["heat"] >= rise))

    def find_dark(self, loss: float) -> Bools:
        """Returns (N,) ports that have lost light while their peers have not."""
        return np.asarray(self.change["light"] >= loss)

    def compared(self, i: int, cohort: str) -> Comparison:
        """Returns the raw BER of a port beside that of its peers or its past."""
        alike = bool(self.size[i] >= _MIN_COHORT)
        other = float(self.centre[i] if alike else self.past[i])
        spread, peers = (float(self.spread[i]), int(self.size[i]) - 1) if alike else (None, 0)
        return Comparison(float(self.recent[i]), other, spread, cohort, peers, self.decades_above_peers(i), "decade")

    def module_evidence(self, i: int) -> dict[str, Any]:
        """Returns heat and light of the module, which point to the cause of errors."""
        values = {
            "module_degrees": float(self.newest["heat"][i]),
            "module_warmer_k": float(self.change["heat"][i]),
            "light_dbm": float(self.newest["light"][i]),
            "light_lost_db": float(self.change["light"][i]),
        }
        return {name: round(value, 2) for name, value in values.items() if np.isfinite(value)}


def _past(hours: NDArray[np.float32]) -> Floats:
    """Returns (N,) the median of the hours before the present; NaN where they are too few."""
    before = hours[:, : HOURS - _RECENT_HOURS]
    enough = np.isfinite(before).sum(axis=1) >= _MIN_PAST_HOURS
    return np.where(enough, row_median(before), np.nan)


def _without_common(raw: NDArray[np.float32], groups: NDArray[np.int32]) -> Floats:
    """Returns (N, 48) less the median of what each cohort did in that hour: departures from each port's own median."""
    series = raw.astype(np.float64)
    own = series - row_median(raw)[:, None]
    for hour in np.flatnonzero(np.isfinite(own).any(axis=0)).tolist():
        common, size = grouped_median(own[:, hour], groups)
        series[:, hour] -= np.where((size >= _MIN_COHORT) & np.isfinite(common), common, 0.0)
    return series


@dataclass
class LinkOptic(Detector):
    """Raw bit error rate of each optical port per hour, against similar ports and against its own two days.

    Ticket, in this order of evidence:
    - rising: since its last step, for `least_hours` h, with Mann-Kendall z > `z` and by more than `slope` decades
      a day (Theil-Sen); it is above `normal` and half a decade above its peers, and the line crosses `fec_limit`
      within `horizon` days;
    - high: above `high` in three hours in a row, and a decade above its peers or, without peers, above its own past;
    - hot: above `hot` degrees C and by half of `hotter` K above its peers, or `hotter` K more than before while its
      peers are as before;
    - dark: `darker` dB less light than before while its peers are as before.
    A ticket stays open until the value is clearly below that of the ticket. A change of all ports alike gives no
    ticket, and a step is not a trend: healthy ports are known to move by more than a decade in one step and stay there.

    Source: RS(544,514) (IEEE 802.3 clause 91) corrects up to about 2.4e-4; raw rates of 1e-8 to 1e-6 are normal on PAM4
    (public mlxlink outputs): `normal` is the worst of them, `high` ten times that; 70 degrees C and 10 K as in
    NVIDIA UFM's PDR plugin; 3 dB is the loss that 400GBASE-DR4 allows its whole channel (IEEE 802.3bs); z, slope and
    horizon chosen.
    """

    name: ClassVar[str] = "link_optic"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nic"
    needs: ClassVar[tuple[str, ...]] = _BER
    wants: ClassVar[tuple[str, ...]] = (
        *("nic.module_temperature", "nic.rx_power_min", "nic.generation"),
        *("event:link_peer", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Optics that fail within hours, the far end of a link (its own counters are needed), ports whose module reports"
        " nothing, and when a stronger code than RS(544,514) fails."
    )

    fec_limit: float = 2.4e-4
    slope: float = 0.2
    z: float = 5.0
    least_hours: int = 24
    horizon: float = 7.0
    normal: float = 1e-6
    high: float = 1e-5
    hot: float = 70.0
    hotter: float = 10.0
    darker: float = 3.0

    history: OpticHistory = part(OpticHistory, kept=True)
    gates: Gates = part(Gates)
    verdicts: Verdicts = notes()
    conditions: OpenConditions = notes()
    _peers: Peers = field(
        default_factory=lambda: Peers(("@module_vendor", "@module_part"), ("@sku",), ("@board_id",), ()),
        init=False,
        repr=False,
    )

    def budget(self) -> list[str]:
        """Returns the false alarm rate of its trend test."""
        rules = "high, hot, dark: a rule on levels that hold for three hours: no statistical alarm rate"
        return [f"rising, {describe_trend_rate(self.z, 24, PORTS_PER_NODE)}", rules]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns tickets of ports; they change once an hour."""
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        complete = self.history.add_frame(frame, lambda: self.gates.maintenance_mask(frame))
        self._reset_moved(frame)
        if complete:
            self._update_verdicts(frame)
        if not self.verdicts:
            self.conditions.clear()
            return []
        return self._findings(frame)

    def _reset_moved(self, frame: Frame) -> None:
        """Resets ports with another device at the far end: their past is that of another link."""
        moved = {event.entity for event in frame.events if event.kind == "link_peer"}
        if moved:
            self.history.reset(np.fromiter((e in moved for e in frame.entities), bool))
            self.verdicts = {e: v for e, v in self.verdicts.items() if e not in moved}

    def _update_verdicts(self, frame: Frame) -> None:
        ports = OpticComparison.compare(self.history, self._peers.groups(frame))
        self.verdicts = {e: v for e, v in self.verdicts.items() if self._still_holds(ports, v, frame.time)}
        limit, reach = np.log10(self.fec_limit), self.horizon
        young = self.history.samples < _MIN_SAMPLES
        candidates = ports.find_candidates(self.high, limit, reach, self.slope, self.least_hours)
        for i in np.flatnonzero(candidates).tolist():
            if not young[i]:
                self._judge_errors(frame, ports, i)
        for i in np.flatnonzero(ports.find_hot(self.hot, self.hotter) | ports.find_dark(self.darker)).tolist():
            self._judge_module(frame, ports, i)

    def _judge_errors(self, frame: Frame, ports: OpticComparison, i: int) -> None:
        """Records a verdict if the raw bit errors of a port rise towards the limit, or are high."""
        limit, found = float(np.log10(self.fec_limit)), fit_trend(ports.series[i])
        rising = found is not None and found.hours >= self.least_hours and found.z > self.z
        rising = rising and found is not None and found.slope > self.slope and ports.is_clear(found)
        days = (limit - found.newest) / found.slope if rising and found is not None else np.inf
        high = ports.is_high(i, self.high, limit)
        due = rising and 0 < days <= self.horizon and ports.decades_above_peers(i) >= 0.5
        due = due and ports.recent[i] > np.log10(self.normal)
        if not (due or high):
            return
        now = ports.recent[i]
        evidence: dict[str, Any] = {"raw_ber": float(10**now), "fec_limit": self.fec_limit}
        title = f"raw BER {10**now:.1e}"
        if rising and found is not None:
            evidence |= {"decades_per_day": found.slope, "mann_kendall_z": found.z, "hours": found.hours}
            title += f", rising by {found.slope:.1f} decades a day"
        if rising and 0 < days <= _FAR_FORECAST_DAYS:
            evidence |= {"forecast": iso(frame.time + int(days * 24 * HOUR)), "days_left": round(float(days), 2)}
            title += f", FEC limit in {days:.0f} d"
        began = found.begins if rising and found is not None else ports.high_since(i, self.high)
        evidence |= ports.module_evidence(i)
        self._record_verdict(frame, ports, i, ("rising" if due else "high", float(now)), (began, title, evidence))

    def _judge_module(self, frame: Frame, ports: OpticComparison, i: int) -> None:
        """Records a verdict on heat or light, unless there is one on bit errors, which matter more."""
        if frame.entities[i] in self.verdicts and self.verdicts[frame.entities[i]]["reason"] in _ERROR_REASONS:
            return
        hot = bool(ports.find_hot(self.hot, self.hotter)[i])
        value = float(ports.newest["heat" if hot else "light"][i])
        title = f"optical module at {value:.0f} °C" if hot else f"{ports.change['light'][i]:.1f} dB less light received"
        evidence = {**ports.module_evidence(i), "raw_ber": float(10 ** ports.recent[i]), "peers_moved": False}
        began = HOURS - _RECENT_HOURS
        self._record_verdict(frame, ports, i, ("hot" if hot else "dark", value), (began, title, evidence))

    def _record_verdict(
        self,
        frame: Frame,
        ports: OpticComparison,
        i: int,
        what: tuple[str, float],
        shown: tuple[int, str, dict[str, Any]],
    ) -> None:
        """Keeps a verdict: the reason and value by which it holds are the first ones, title and numbers the newest."""
        entity, (reason, value), (began, title, facts) = frame.entities[i], what, shown
        onset = min(frame.time, frame.time // HOUR * HOUR - (HOURS - began) * HOUR)
        kept = self.verdicts.get(entity, {"reason": reason, "value": value, "onset": onset, "seen": frame.time})
        facts |= {"cohort": self._peers.cohort_name(frame, i) or "all ports"} if ports.size[i] >= _MIN_COHORT else {}
        compared = ports.compared(i, facts.pop("cohort", "own past")) if reason in _ERROR_REASONS else None
        clears = {
            "rising": "the raw bit error rate falls to half of what it was, or the module or fibre is in maintenance",
            "high": "the raw bit error rate falls to half of what it was, or the module or fibre is in maintenance",
            "hot": "the module is 3 K cooler than when it was ticketed",
            "dark": "1 dB of the light comes back",
        }[kept["reason"]]
        kept |= {"title": title, "evidence": dict(make_evidence(clears, compared, reason=reason, **facts))}
        above = ports.decades_above_peers(i)
        kept["score"] = abs(above) if np.isfinite(above) else 1.0
        self.verdicts[entity] = kept | {"index": i}

    def _still_holds(self, ports: OpticComparison, verdict: dict[str, Any], time: int) -> bool:
        """Returns whether a port is not yet well below the value of its ticket; without readings, for two days."""
        i, reason, value = verdict["index"], verdict["reason"], verdict["value"]
        errors = reason in _ERROR_REASONS
        now = ports.recent[i] if errors else ports.newest["heat" if reason == "hot" else "light"][i]
        if np.isnan(now):
            return bool(time - verdict["seen"] <= _SILENT_FOR)
        verdict["seen"] = time
        return bool({"hot": now >= value - 3.0, "dark": now <= value + 1.0}.get(reason, now >= value - 0.3))

    def _findings(self, frame: Frame) -> list[Finding]:
        close_ended(self.conditions, set(self.verdicts))
        found = []
        for entity, verdict in sorted(self.verdicts.items()):
            if due := due_report(self.conditions, entity, frame.time, verdict["onset"], "ticket"):
                reason, (onset, level) = verdict["evidence"]["reason"], due
                signals = _BER if reason in _ERROR_REASONS else (_MODULE_SIGNAL[reason],)
                summary, score = pager_title(entity, verdict["title"]), verdict["score"]
                head = (frame.time, onset, entity, self.name, level, score, summary)
                found.append(Finding(*head, verdict["evidence"], signals))
        return found
