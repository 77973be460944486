"""The two ends of a cable: optical modules, the port at the far end, and which side of a link to blame."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.job_index import JobIndex
from detectors.base.state import N, State, memory
from detectors.base.statistics import median_of
from detectors.base.topology_index import per_device_topology
from detectors.link.counters import Floats
from pipeline.model.links import PEER
from pipeline.model.records import Frame, to_json
from pipeline.model.topology import Topology

MODULE_SIGNALS = ("nic.rx_power_min", "nic.tx_power_min", "nic.module_temperature")
RX, TX, HEAT = MODULE_SIGNALS
LOW_LIGHT_SHARE = 0.5
"""Share of the median light (3 dB) below which light is low: ports of one kind differ by less. Chosen."""
NO_LIGHT_MW = 0.001
"""mW (-30 dBm) below which no light arrives: receivers of 100G and faster need about -10 dBm (CMIS modules)."""
HOT_CEL, HOTTER_K = 70.0, 10.0
"""Cel, and K above the median of the modules: thresholds of NVIDIA's UFM PDR plugin."""
_MIN_MODULES = 4  # with a reading, for a median; chosen
_IMPLAUSIBLE = 1e4  # mW or Cel that no module reports; all bits set are read as more
UNKNOWN_END = "unknown which end"


@dataclass
class OpticalModules(State):
    """The newest light levels and temperature of each port's module; they are read once a minute."""

    newest: Floats = memory(np.nan, shape=(len(MODULE_SIGNALS), N))
    _medians: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def update(self, frame: Frame) -> None:
        """Reads the modules of an instant."""
        self._medians.clear()
        for row, signal in enumerate(MODULE_SIGNALS):
            if signal in frame.values:
                now = frame.values[signal]
                self.grow(len(now))
                np.copyto(self.newest[row, : len(now)], now, where=np.abs(now) < _IMPLAUSIBLE)

    def newest_value(self, signal: str, port: int) -> float:
        """Returns the last value of a port's module; NaN if there is none, or no such port."""
        known = self.newest[MODULE_SIGNALS.index(signal)]
        return float(known[port]) if 0 <= port < len(known) else np.nan

    def fleet_median(self, signal: str) -> float:
        """Returns the median of all modules; NaN if few report."""
        if signal not in self._medians:
            known = self.newest[MODULE_SIGNALS.index(signal)]
            median, reported = median_of(np.where(known != 0, known, np.nan))
            self._medians[signal] = median if reported >= _MIN_MODULES else np.nan
        return self._medians[signal]

    def has_low_light(self, signal: str, port: int) -> bool | None:
        """Returns whether there is much less light than at other ports; None: not reported."""
        light, usual = self.newest_value(signal, port), self.fleet_median(signal)
        return None if np.isnan(light) or np.isnan(usual) else light < LOW_LIGHT_SHARE * usual

    def has_no_light(self, port: int) -> bool | None:
        """Returns whether no light arrives; None: not reported."""
        light = self.newest_value(RX, port)
        return None if np.isnan(light) else light < NO_LIGHT_MW

    def is_hot(self, port: int) -> bool:
        """Returns whether the module is too hot, or much hotter than others."""
        heat, usual = self.newest_value(HEAT, port), self.fleet_median(HEAT)
        return heat >= HOT_CEL or heat >= usual + HOTTER_K

    def as_evidence(self, port: int) -> dict[str, float | None]:
        """Returns the values of a port's module, by signal."""
        return {
            signal: to_json(round(v, 4))
            for signal in MODULE_SIGNALS
            if not np.isnan(v := self.newest_value(signal, port))
        }


class FarEnds:
    """The port at the far end of each port's cable, where both ends are monitored."""

    @per_device_topology
    def find_far_ends(self, frame: Frame) -> NDArray[np.int64]:
        """Returns (N,) index of the far end in the frame; -1 where it is not known."""
        index = {e: i for i, e in enumerate(frame.entities)}
        attributes = frame.topology.attributes
        peers = (attributes.get(e, {}).get(PEER) for e in frame.entities)
        return np.fromiter((index.get(p, -1) if isinstance(p, str) else -1 for p in peers), np.int64)


class PortSurroundings(FarEnds):
    """The far end of each port's cable, and the GPUs and jobs on its node."""

    def __init__(self) -> None:
        self._jobs = JobIndex()

    def gpus_beside(self, port: str, topology: Topology) -> frozenset[str]:
        """Returns the GPUs of a port's node."""
        return self._jobs.gpus_of(topology.ancestor_of_kind(port, "node") or "", topology)

    def has_job(self, port: str, topology: Topology) -> bool:
        """Returns whether a job runs on a port's node."""
        return any(self._jobs.job_on(gpu, topology) for gpu in self.gpus_beside(port, topology))


@dataclass(frozen=True, slots=True)
class CableEnds:
    """The ends of one cable as its end `near` reports them: indices in the frame (-1: not monitored) and names."""

    near: int
    far: int
    near_name: str
    far_name: str

    @property
    def transmitter(self) -> str:
        """The two causes of errors at the receiver of `near` that look the same."""
        return f"transmitter of {self.far_name} or the cable"


def blame_for_errors(cable: CableEnds, modules: OpticalModules, far_has_errors: bool | None) -> str:
    """Returns the suspected side where the receiver of `near` reports errors. far_has_errors: None: not monitored."""
    low_light = modules.has_low_light(RX, cable.near)
    if far_has_errors:
        return "the cable: receivers at both ends report errors"
    if low_light:
        return f"transmitter of {cable.far_name}" if _far_end_sends_badly(cable, modules) else cable.transmitter
    if modules.is_hot(cable.near):
        return f"receiver of {cable.near_name}, whose module is hot"
    if _far_end_sends_badly(cable, modules):
        return f"transmitter of {cable.far_name}"
    if far_has_errors is None:
        return f"{UNKNOWN_END}: far end not monitored"
    return cable.transmitter if low_light is None else f"light is normal: receiver of {cable.near_name} or the cable"


def blame_for_link_down(cable: CableEnds, modules: OpticalModules) -> str:
    """Returns the suspected side of a link that is down."""
    here, there = modules.has_no_light(cable.near), modules.has_no_light(cable.far)
    if here and there:
        return "the cable: no light at either end"
    if here:
        return f"no light: {cable.transmitter}"
    if there:
        return f"no light at {cable.far_name}: transmitter of {cable.near_name} or the cable"
    return UNKNOWN_END


def blame_for_flaps(cable: CableEnds, modules: OpticalModules) -> str:
    """Returns the suspected side of a link that flaps, which only its modules show."""
    if modules.has_low_light(RX, cable.near):
        return f"transmitter of {cable.far_name}" if _far_end_sends_badly(cable, modules) else cable.transmitter
    if modules.has_low_light(RX, cable.far):
        return f"transmitter of {cable.near_name} or the cable"
    ends = ((cable.near, cable.near_name), (cable.far, cable.far_name))
    hot = [name for i, name in ends if modules.is_hot(i)]
    return f"the module of {hot[0]}, which is hot" if len(hot) == 1 else UNKNOWN_END


def _far_end_sends_badly(cable: CableEnds, modules: OpticalModules) -> bool:
    return bool(modules.has_low_light(TX, cable.far)) or modules.is_hot(cable.far)
