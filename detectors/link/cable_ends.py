"""The two ends of a cable: what the far end and the modules tell, and which side of the link is bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Key
from detectors.base.state import grown
from detectors.link.counters import Floats
from pipeline.model.links import PEER
from pipeline.model.records import Frame, to_json
from pipeline.model.topology import Topology

MODULE = ("nic.rx_power_min", "nic.tx_power_min", "nic.module_temperature")
FAINT = 0.5
"""Light below this share (3 dB) of what other ports receive is faint: ports of one kind differ by less. Chosen."""
DARK = 0.001
"""mW (-30 dBm) below which no light arrives: receivers of 100G and faster need -10 dBm or so (CMIS modules)."""
HOT, HOTTER = 70.0, 10.0
"""Cel, and K above the other modules: thresholds of NVIDIA's UFM PDR plugin."""
_PEERS = 4  # modules below which their median is no witness; chosen
_SILENCE = 1e4  # mW, or Cel: no module tells that much; all bits set read so


class Modules:
    """The newest that each module told: they are read once a minute."""

    def __init__(self) -> None:
        self.newest: dict[str, Floats] = {}
        self._usual: dict[str, float] = {}

    def take(self, frame: Frame) -> None:
        self._usual.clear()
        for signal in MODULE:
            if signal in frame.values:
                now = frame.values[signal]
                known = self.newest[signal] = grown(self.newest.get(signal, np.empty(0)), len(now), np.nan)
                np.copyto(known[: len(now)], now, where=np.abs(now) < _SILENCE)

    def of(self, signal: str, port: int) -> float:
        """What the module of a port told last; NaN if it never did, or there is no such port."""
        known = self.newest.get(signal)
        return float(known[port]) if known is not None and 0 <= port < len(known) else np.nan

    def usual(self, signal: str) -> float:
        """What the modules of the other ports tell; NaN if they are few."""
        if signal not in self._usual:
            known = self.newest.get(signal, np.empty(0))
            told = known[np.isfinite(known) & (known != 0)]
            self._usual[signal] = float(np.median(told)) if len(told) >= _PEERS else np.nan
        return self._usual[signal]

    def faint(self, signal: str, port: int) -> bool | None:
        """Whether much less light is there than at other ports; None: not told."""
        light, usual = self.of(signal, port), self.usual(signal)
        return None if np.isnan(light) or np.isnan(usual) else light < FAINT * usual

    def dark(self, port: int) -> bool | None:
        """Whether no light arrives; None: not told."""
        light = self.of("nic.rx_power_min", port)
        return None if np.isnan(light) else light < DARK

    def hot(self, port: int) -> bool:
        """Whether the module is too hot, or much hotter than others."""
        heat, usual = self.of("nic.module_temperature", port), self.usual("nic.module_temperature")
        return heat >= HOT or heat >= usual + HOTTER

    def told(self, port: int) -> dict[str, float | None]:
        """What there is of a module, for the evidence."""
        return {signal: to_json(round(v, 4)) for signal in MODULE if not np.isnan(v := self.of(signal, port))}

    def snapshot(self) -> dict[str, Any]:
        return {signal: known.copy() for signal, known in self.newest.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.newest = dict(state)
        self._usual.clear()


@dataclass
class Ends:
    """Who is at the far end of whose cable, as far as both are watched; renewed with the topology."""

    _key: Key = ()
    _topology: Topology | None = None
    _at: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def of(self, frame: Frame) -> NDArray[np.int64]:
        """(N,) place of the far end in the frame; -1 where it is not known."""
        key = (frame.topology.version, len(frame.entities))
        if key != self._key or frame.topology is not self._topology:
            place = {e: i for i, e in enumerate(frame.entities)}
            facts = frame.topology.attributes
            named = (facts.get(e, {}).get(PEER) for e in frame.entities)
            self._at = np.fromiter((place.get(p, -1) if isinstance(p, str) else -1 for p in named), np.int64)
            self._key, self._topology = key, frame.topology
        return self._at


@dataclass(frozen=True, slots=True)
class Link:
    """One link as its end `near` shows it: places of both ends in the frame (-1: not watched) and their names."""

    near: int
    far: int
    near_name: str
    far_name: str

    @property
    def transmitter(self) -> str:
        return f"transmitter of {self.far_name} or the cable"


def of_errors(link: Link, modules: Modules, far_errs: bool | None) -> str:
    """The side to suspect where the receiver of `near` sees errors; far_errs: whether that of the far end does too."""
    faint = modules.faint("nic.rx_power_min", link.near)
    if far_errs:
        return "the cable: the receivers of both ends see errors"
    if faint:
        return f"transmitter of {link.far_name}" if _sends_badly(link, modules) else link.transmitter
    if modules.hot(link.near):
        return f"receiver of {link.near_name}, whose module is hot"
    if _sends_badly(link, modules):
        return f"transmitter of {link.far_name}"
    if far_errs is None:
        return "cannot tell which end: the far end is not watched"
    return link.transmitter if faint is None else f"cannot tell: light is normal; receiver of {link.near_name} or cable"


def of_loss(link: Link, modules: Modules) -> str:
    """The side to suspect of a link that is down."""
    here, there = modules.dark(link.near), modules.dark(link.far)
    if here and there:
        return "the cable: no light arrives at either end"
    if here:
        return f"no light arrives: {link.transmitter}"
    if there:
        return f"no light arrives at {link.far_name}: transmitter of {link.near_name} or the cable"
    return "cannot tell which end"


def of_flaps(link: Link, modules: Modules) -> str:
    """The side to suspect of a link that comes and goes: only its modules tell."""
    if modules.faint("nic.rx_power_min", link.near):
        return f"transmitter of {link.far_name}" if _sends_badly(link, modules) else link.transmitter
    if modules.faint("nic.rx_power_min", link.far):
        return f"transmitter of {link.near_name} or the cable"
    hot = [name for i, name in ((link.near, link.near_name), (link.far, link.far_name)) if modules.hot(i)]
    return f"the module of {hot[0]}, which is hot" if len(hot) == 1 else "cannot tell which end"


def _sends_badly(link: Link, modules: Modules) -> bool:
    return bool(modules.faint("nic.tx_power_min", link.far)) or modules.hot(link.far)
