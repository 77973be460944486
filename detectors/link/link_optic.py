"""Finds optics that will fail: raw bit errors that rise, modules that run hot, light that fades; tickets only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Open, close, evidence, tell
from detectors.base.gates import Gates
from detectors.link.alarm_rates import LINKS, of_trend
from detectors.link.optic_history import HOUR, OpticHistory
from detectors.link.optic_looks import Looks
from pipeline.records import Finding, Frame, iso

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
    blind: ClassVar[str] = (
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
    conditions: Open = notes()
    _peers: Peers = field(
        default_factory=lambda: Peers(("@module_vendor", "@module_part"), ("@sku",), ("@board_id",), ()),
        init=False,
        repr=False,
    )

    def budget(self) -> list[str]:
        rules = "high, hot, dark: a rule on levels that hold for three hours: no statistical alarm rate"
        return [f"rising, {of_trend(self.z, 24, LINKS)}", rules]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.hear(frames)
        frame = frames.get("nic")
        if frame is None or not len(frame.entities):
            return []
        complete = self.history.take(frame, lambda: self.gates.working(frame))
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
            self.history.forget(np.fromiter((e in moved for e in frame.entities), bool))
            self.verdicts = {e: v for e, v in self.verdicts.items() if e not in moved}

    def _judge(self, frame: Frame) -> None:
        looks = Looks.of(self.history, self._peers.of(frame))
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
        facts |= {"cohort": self._peers.name(frame, i) or "all ports"} if looks.size[i] >= 8 else {}
        compared = looks.compared(i, facts.pop("cohort", "own past")) if reason in ("rising", "high") else None
        clears = {
            "rising": "the raw bit error rate falls to half of what it was, or the module or fibre is worked on",
            "high": "the raw bit error rate falls to half of what it was, or the module or fibre is worked on",
            "hot": "the module is 3 K cooler than when it was ticketed",
            "dark": "1 dB of the light comes back",
        }[kept["reason"]]
        kept |= {"text": text, "evidence": dict(evidence(clears, compared, reason=reason, **facts))}
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
        close(self.conditions, set(self.verdicts))
        found = []
        for entity, said in sorted(self.verdicts.items()):
            if due := tell(self.conditions, entity, frame.time, said["onset"], "ticket"):
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
