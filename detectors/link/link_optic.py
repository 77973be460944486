"""Finds optics that will fail: raw bit errors that rise, modules that run hot, light that fades; tickets only.

What the last two days of all optical ports look like at the end of an hour: levels, changes, peers, candidates.
"""

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
from detectors.link.alarm_rates import LINKS, of_trend
from detectors.link.optic_history import HOUR, HOURS, OpticHistory, Trend, row_median, trend
from pipeline.model.records import Finding, Frame, iso

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_RECENT, _PAST = 3, 12  # h that make the present; h before them from which a past can be told. Chosen
_COHORT = 8  # ports below which a median says little: the guilty one would be half of it
_DECADE = 1.0  # above peers or past: what the sound ports of a cohort differ by is less; chosen
_NORMAL = 1.4826
_OUTLIER = 3.0  # standard deviations of the cohort; chosen: beyond them is 1 in 740 of normal ports
_SURE = 6.0  # standard deviations that a rise must have over what it wanders; chosen


@dataclass(frozen=True)
class Looks:
    """One hour's look. log10 of raw BER, degrees C and dBm; NaN where nothing was measured.

    series: (N, 48) log10 of the raw BER, less what all of its cohort did.
    recent: (N,) median of the last three hours.  past: (N,) that of the hours before.
    centre, spread, size: (N,) of the cohort's recent values.
    newest, change: of `heat` and `light`: now, and harm against the own past less that of the cohort.
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

    @classmethod
    def of(cls, history: OpticHistory, groups: NDArray[np.int32]) -> Looks:
        raw = history.of("ber")[: len(groups)]
        recent, past = row_median(raw[:, -_RECENT:]), _past(raw)
        centre, size = grouped_median(recent, groups)
        spread, _ = grouped_mad(recent, groups)
        newest, change = {}, {}
        for kind, sign in (("heat", 1.0), ("light", -1.0)):
            hours = history.of(kind)[: len(groups)]
            newest[kind] = row_median(hours[:, -_RECENT:])
            moved = sign * (newest[kind] - _past(hours))
            common, peers = grouped_median(moved, groups)
            change[kind] = moved - np.where((peers >= _COHORT) & np.isfinite(common), common, 0.0)
        return cls(_without_common(raw, groups), raw, recent, past, centre, _NORMAL * spread, size, newest, change)

    def suspects(self, high: float, limit: float, horizon: float, slope: float, hours: int) -> Bools:
        """(N,) ports worth the full look: high, or halves that differ by most of what would cross the limit in time."""
        half = hours // 2
        late, early = row_median(self.series[:, -half:]), row_median(self.series[:, -2 * half : -half])
        speed = (late - early) / half * 24
        wanted = np.maximum(slope, (limit - self.recent) / horizon)
        rises = (speed > 0.6 * wanted) & (self.recent < limit)  # NaN: no
        return np.asarray(rises | (self._high_hours(high) >= _RECENT))

    def is_high(self, i: int, high: float, limit: float) -> bool:
        """High for three hours, and far from its peers; without peers, from its own past.

        A link that works beyond the limit has a stronger code, and where its peers differ by much it is like some.
        """
        spread = self.spread[i] if self.size[i] >= _COHORT else 0.0
        far = self.above(i) >= max(_DECADE, _OUTLIER * spread)
        return bool(self._high_hours(high)[i] >= _RECENT and far and self.recent[i] < limit)

    def above(self, i: int) -> float:
        """Decades above its peers; without peers, above its own past. NaN: neither is known."""
        other = self.centre[i] if self.size[i] >= _COHORT else self.past[i]
        return float(self.recent[i] - other)

    def high_since(self, i: int, high: float) -> int:
        """Place of the first of the last hours that are high."""
        low = np.flatnonzero(~(self.raw[i] > np.log10(high)))
        return int(low[-1]) + 1 if len(low) else 0

    def _high_hours(self, high: float) -> NDArray[np.int64]:
        """(N,) how many of the last three hours are high."""
        return np.asarray((self.raw[:, -_RECENT:] > np.log10(high)).sum(axis=1))

    def trend(self, i: int) -> Trend | None:
        return trend(self.series[i])

    def clear(self, found: Trend) -> bool:
        """Whether it has risen by more than it wanders."""
        return found.slope * found.hours / 24 > _SURE * found.spread

    def hot(self, limit: float, rise: float) -> Bools:
        """(N,) hotter than modules may be, or than it was while its peers are as they were."""
        return np.asarray((self.newest["heat"] > limit) | (self.change["heat"] >= rise))

    def dark(self, loss: float) -> Bools:
        """(N,) has lost light while its peers have not."""
        return np.asarray(self.change["light"] >= loss)

    def among(self, i: int) -> str:
        """Whom a port is compared with, in words."""
        if self.size[i] >= _COHORT:
            return f"{self.size[i] - 1} ports alike: {10 ** self.centre[i]:.1e}"
        return f"its own past: {10 ** self.past[i]:.1e}" if np.isfinite(self.past[i]) else "nothing to compare it with"

    def compared(self, i: int, cohort: str) -> Comparison:
        alike = bool(self.size[i] >= _COHORT)
        other = float(self.centre[i] if alike else self.past[i])
        spread, peers = (float(self.spread[i]), int(self.size[i]) - 1) if alike else (None, 0)
        return Comparison(float(self.recent[i]), other, spread, cohort, peers, self.above(i), "decade")

    def module(self, i: int) -> dict[str, Any]:
        """What the module says beside it: heat and loss of light point to the cause."""
        facts = {
            "module_degrees": float(self.newest["heat"][i]),
            "module_warmer_k": float(self.change["heat"][i]),
            "light_dbm": float(self.newest["light"][i]),
            "light_lost_db": float(self.change["light"][i]),
        }
        return {name: round(value, 2) for name, value in facts.items() if np.isfinite(value)}


def _past(hours: NDArray[np.float32]) -> Floats:
    """(N,) median of the hours before the present; NaN where they are too few."""
    before = hours[:, : HOURS - _RECENT]
    enough = np.isfinite(before).sum(axis=1) >= _PAST
    return np.where(enough, row_median(before), np.nan)


def _without_common(raw: NDArray[np.float32], groups: NDArray[np.int32]) -> Floats:
    """(N, 48) less the median of what each cohort did in that hour, departures from each port's own median."""
    series = raw.astype(np.float64)
    own = series - row_median(raw)[:, None]
    for hour in np.flatnonzero(np.isfinite(own).any(axis=0)).tolist():
        common, size = grouped_median(own[:, hour], groups)
        series[:, hour] -= np.where((size >= _COHORT) & np.isfinite(common), common, 0.0)
    return series


Verdicts = dict[str, dict[str, Any]]
_SILENT = 48 * HOUR  # that a ticket stands while its port tells nothing: as long as its history; chosen
_BER = ("nic.phy_corrected_bits", "nic.phy_bits")


@dataclass
class LinkOptic(Detector):
    """Raw bit error rate of each optical port by the hour, against ports alike and against its own two days.

    Ticket, in this order of evidence:
    - rising: since its last step, for `least_hours` h, with Mann-Kendall z > `z` and by more than `slope` decades
      a day (Theil-Sen); it is above `normal` and half a decade above its peers, and the line crosses `fec_limit`
      within `horizon` days;
    - high: above `high` in three hours running, and a decade above its peers or, without peers, above its own past;
    - hot: above `hot` degrees C, or `hotter` K more than before while its peers are as before;
    - dark: `darker` dB less light than before while its peers are as before.
    A ticket holds until the port is well below what it was ticketed for. What moves all ports alike blames none, and a
    step is no trend: sound ports are known to move by more than a decade at once and stay there.

    Source: RS(544,514) (IEEE 802.3 clause 91) mends up to about 2.4e-4; raw rates of 1e-8 to 1e-6 are normal on PAM4
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
        "Optics that fail within hours, the far end of a link (its own counters are needed), ports whose module tells"
        " nothing, and when a stronger code than RS(544,514) gives up."
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

    history: OpticHistory = part(OpticHistory)
    gates: Gates = part(Gates)
    verdicts: Verdicts = notes()
    conditions: OpenConditions = notes()
    _peers: Peers = field(
        default_factory=lambda: Peers(("@module_vendor", "@module_part"), ("@sku",), ("@board_id",), ()),
        init=False,
        repr=False,
    )

    def budget(self) -> list[str]:
        rules = "high, hot, dark: a rule on levels that hold for three hours: no statistical alarm rate"
        return [f"rising, {of_trend(self.z, 24, LINKS)}", rules]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        complete = self.history.take(frame, lambda: self.gates.maintenance_mask(frame))
        self._forget(frame)
        if complete:
            self._judge(frame)
        if not self.verdicts:
            self.conditions.clear()
            return []
        return self._findings(frame)

    def _forget(self, frame: Frame) -> None:
        """With another device at the far end, a port's past is that of another link."""
        moved = {event.entity for event in frame.events if event.kind == "link_peer"}
        if moved:
            self.history.reset(np.fromiter((e in moved for e in frame.entities), bool))
            self.verdicts = {e: v for e, v in self.verdicts.items() if e not in moved}

    def _judge(self, frame: Frame) -> None:
        looks = Looks.of(self.history, self._peers.groups(frame))
        self.verdicts = {e: v for e, v in self.verdicts.items() if self._holds(looks, v, frame.time)}
        limit, reach = np.log10(self.fec_limit), self.horizon
        young = self.history.samples < 20  # the replay contract
        for i in np.flatnonzero(looks.suspects(self.high, limit, reach, self.slope, self.least_hours)).tolist():
            if not young[i]:
                self._of_errors(frame, looks, i)
        for i in np.flatnonzero(looks.hot(self.hot, self.hotter) | looks.dark(self.darker)).tolist():
            self._of_module(frame, looks, i)

    def _of_errors(self, frame: Frame, looks: Looks, i: int) -> None:
        """A verdict on the raw bit errors of one port that may be rising, or is high."""
        limit, found = float(np.log10(self.fec_limit)), looks.trend(i)
        rising = found is not None and found.hours >= self.least_hours and found.z > self.z
        rising = rising and found is not None and found.slope > self.slope and looks.clear(found)
        days = (limit - found.newest) / found.slope if rising and found is not None else np.inf
        high = looks.is_high(i, self.high, limit)
        due = rising and 0 < days <= self.horizon and looks.above(i) >= 0.5
        due = due and looks.recent[i] > np.log10(self.normal)
        if not (due or high):
            return
        now, words = looks.recent[i], []
        facts: dict[str, Any] = {"raw_ber": float(10**now), "fec_limit": self.fec_limit}
        if rising and found is not None:
            words.append(f"rises by {found.slope:.2f} decades a day")
            facts |= {"decades_per_day": found.slope, "mann_kendall_z": found.z, "hours": found.hours}
        if rising and 0 < days <= 60:
            crossing = iso(frame.time + int(days * 24 * HOUR))
            facts |= {"forecast": crossing, "days_left": round(float(days), 2)}
            words.append(f"reaches the {self.fec_limit:.1e} that RS-FEC mends about {crossing[:16]}Z")
        else:
            words.append(f"{limit - now:.1f} decades are left to the {self.fec_limit:.1e} that RS-FEC mends")
        began = found.begins if rising and found is not None else looks.high_since(i, self.high)
        facts |= looks.module(i)
        text = f"has a raw bit error rate of {10**now:.1e} ({looks.among(i)}): " + ", ".join(words)
        self._take(frame, looks, i, ("rising" if due else "high", float(now)), (began, text, facts))

    def _of_module(self, frame: Frame, looks: Looks, i: int) -> None:
        """A verdict on heat or light, unless bit errors have given one: they matter more."""
        if frame.entities[i] in self.verdicts and self.verdicts[frame.entities[i]]["reason"] in ("rising", "high"):
            return
        warm = bool(looks.hot(self.hot, self.hotter)[i])
        value = float(looks.newest["heat" if warm else "light"][i])
        change = float(looks.change["heat" if warm else "light"][i])
        moved = "" if np.isnan(change) else f", {abs(change):.1f} {'K more' if warm else 'dB less'} than before"
        text = f"has a module of {value:.0f} degrees C{moved}" if warm else f"receives {value:.1f} dBm of light{moved}"
        facts = {**looks.module(i), "raw_ber": float(10 ** looks.recent[i]), "peers_moved": False}
        self._take(frame, looks, i, ("hot" if warm else "dark", value), (45, text, facts))

    def _take(
        self,
        frame: Frame,
        looks: Looks,
        i: int,
        what: tuple[str, float],
        said: tuple[int, str, dict[str, Any]],
    ) -> None:
        """Notes a verdict: the reason and value that it holds by are the first ones, words and numbers the newest."""
        entity, (reason, value), (began, text, facts) = frame.entities[i], what, said
        onset = min(frame.time, frame.time // HOUR * HOUR - (48 - began) * HOUR)
        kept = self.verdicts.get(entity, {"reason": reason, "value": value, "onset": onset, "seen": frame.time})
        facts |= {"cohort": self._peers.cohort_name(frame, i) or "all ports"} if looks.size[i] >= 8 else {}
        compared = looks.compared(i, facts.pop("cohort", "own past")) if reason in ("rising", "high") else None
        clears = {
            "rising": "the raw bit error rate falls to half of what it was, or the module or fibre is worked on",
            "high": "the raw bit error rate falls to half of what it was, or the module or fibre is worked on",
            "hot": "the module is 3 K cooler than when it was ticketed",
            "dark": "1 dB of the light comes back",
        }[kept["reason"]]
        kept |= {"text": text, "evidence": dict(make_evidence(clears, compared, reason=reason, **facts))}
        kept["score"] = abs(looks.above(i)) if np.isfinite(looks.above(i)) else 1.0
        self.verdicts[entity] = kept | {"place": i}

    def _holds(self, looks: Looks, verdict: dict[str, Any], time: int) -> bool:
        """Until it is well below what it was ticketed for; while it does not tell, for two days."""
        i, reason, value = verdict["place"], verdict["reason"], verdict["value"]
        errors = reason in ("rising", "high")
        now = looks.recent[i] if errors else looks.newest["heat" if reason == "hot" else "light"][i]
        if np.isnan(now):
            return bool(time - verdict["seen"] <= _SILENT)
        verdict["seen"] = time
        return bool({"hot": now >= value - 3.0, "dark": now <= value + 1.0}.get(reason, now >= value - 0.3))

    def _findings(self, frame: Frame) -> list[Finding]:
        close_ended(self.conditions, set(self.verdicts))
        found = []
        for entity, said in sorted(self.verdicts.items()):
            if due := due_report(self.conditions, entity, frame.time, said["onset"], "ticket"):
                errors = said["evidence"]["reason"] in ("rising", "high")
                module = {"hot": "nic.module_temperature", "dark": "nic.rx_power_min"}
                signals = _BER if errors else (module[said["evidence"]["reason"]],)
                summary = f"{entity} {said['text']}"
                found.append(
                    Finding(
                        frame.time, due[0], entity, self.name, due[1], said["score"], summary, said["evidence"], signals
                    )
                )
        return found
