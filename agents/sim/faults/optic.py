"""Optics that age: raw bit errors rise by decades over days, until error correction fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import DAY, HOUR, Chain, Fault, Kind, Rate, Span
from agents.sim.faults.link import flap

_NEW, _CLIFF, _WORST = -9.0, -3.3, -2.6
"""log10 of the raw BER that it adds: when nothing is seen; when codewords fail every second and the link flaps; beyond
which a link does not train. RS(544,514) holds to about 2.4e-4."""
_USUAL, _DECADE = -7.5, 1.0  # log10 of a sound port's raw BER; the smallest rise that can be detected
_SETTLES = HOUR  # within which it reaches `start`
_FAILS = -3.62  # log10 of 2.4e-4: the first codeword in hours fails
_COLLECTIVE = 1.1  # factor on the job's collectives while packets are sent again; chosen
_DARKER = ("dirt", "dirt", "heat")  # two of three from dirt, one from a hot module; chosen


@dataclass(frozen=True)
class OpticDegradation(Kind):
    """Optic or connector degrades for days: raw bit errors rise by decades, then the FEC fails and the link flaps."""

    name = "optic_degradation"
    row = 14
    strikes = "nic"
    detectability = "soft"
    attribution = "network"
    seen = "corrected bits per bit, received light or module temperature; at the end symbol errors, recoveries, flaps"
    unseen = "anything before the raw error rate has risen by a decade: from there on it counts as detectable"
    rate = Rate(0.004, "link-month", "assumed: 0.5 % of optical links a month degrade, four fifths of them slowly")
    lasts = Span(6 * HOUR, 2 * DAY, 14 * DAY)
    signals = (
        *("nic.phy_corrected_bits", "nic.phy_bits", "nic.rx_power_min", "nic.module_temperature"),
        *("nic.symbol_errors", "nic.crc_errors", "nic.link_recoveries", "nic.carrier_changes"),
    )
    ranges: ClassVar = {"slope": (0.1, 1.0), "start": (-8.0, -4.5), "loss": (0.5, 3.0), "heat": (10.0, 25.0)}
    limits: ClassVar = {
        "slope": (0.0, 100.0),
        "start": (-9.0, -2.6),
        "loss": (0.0, 40.0),
        "heat": (0.0, 60.0),
        "flap_every": (60.0, 1e6),
    }
    choices: ClassVar = {"cause": _DARKER}
    severe = "slope"
    chain = Chain("link_down", 0.15, Span(3 * HOUR, DAY, 7 * DAY))
    slope: float | None = None  # decades a day
    start: float | None = None  # log10 of the raw BER that it has within the hour: a scratch is sudden
    loss: float | None = None  # dB of received light that are gone at the cliff, where dirt is the cause
    heat: float | None = None  # K by which the module is too hot at the cliff, where heat is
    cause: str | None = None
    flap_every: float = 900.0  # mean time between flaps beyond the cliff (s)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.loss is not None
        assert self.heat is not None
        device, port = fault.device, effects.port
        here, log_ber = effects.active(fault.onset, fault.end), self._log_ber(effects.time - fault.onset)
        port.raw_ber.raise_to(device, np.where(here, log_ber, -99.0))
        far = here * np.clip((log_ber - _NEW) / (_CLIFF - _NEW), 0, None)  # of the way to the cliff
        if self.cause == "dirt":
            port.rx_power.add(device, -self.loss * far)
        else:
            port.module_temperature.add(device, self.heat * far)
        failing = here & (log_ber > _CLIFF - 0.15)
        if failing.any():
            port.recoveries.add(device, 0.003 * failing)  # one in five minutes; chosen
            effects.slow_job([device], 1 + (_COLLECTIVE - 1) * failing)
        for begin, end in self._flaps(fault, effects.until):
            flap(effects, fault.entity, device, begin, end)

    def detectable(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        return min(fault.onset + self._reaches(_USUAL + _DECADE), fault.end)

    def cliff(self, fault: Fault) -> float:
        """Second from which error correction gives codewords up; the end, if it does not come to that."""
        return min(fault.onset + self._reaches(_FAILS), fault.end)

    def _log_ber(self, age: np.ndarray) -> np.ndarray:
        """log10 of the raw BER that it adds, by its age in s."""
        assert self.slope is not None
        assert self.start is not None
        settled = _NEW + (self.start - _NEW) * np.clip(age / _SETTLES, 0, 1)
        return np.minimum(settled + self.slope * np.maximum(age - _SETTLES, 0) / DAY, _WORST)

    def _reaches(self, log_ber: float) -> float:
        """Its age when it adds so much."""
        assert self.slope is not None
        assert self.start is not None
        if log_ber <= self.start:
            return _SETTLES * (log_ber - _NEW) / max(self.start - _NEW, 1e-9)
        return _SETTLES + (log_ber - self.start) / max(self.slope, 1e-9) * DAY

    def _flaps(self, fault: Fault, until: float) -> Iterator[tuple[float, float]]:
        """Begin and end of each flap beyond the cliff that begins by `until`."""
        rng, begin = fault.rng(), fault.onset + self._reaches(_CLIFF)
        while (begin := begin + float(rng.uniform(0.3, 1.7)) * self.flap_every) < fault.end and begin <= until:
            end = begin + float(rng.uniform(1.0, 30.0))  # published flaps last 1 to 30 s
            if end < fault.end:
                yield begin, end
