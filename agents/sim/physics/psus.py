"""Power supplies of the nodes: those that give share the node's power; what one loses the others carry."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import PSUS, Layout
from agents.sim.physics.facility import HOST_W
from agents.sim.physics.noise import Floats, generator
from pipeline.signals.coolant import HEALTH

_SHARING, _NOISE = 0.02, 0.005  # spread of the shares, as active load sharing leaves it; noise of a reading. Chosen
_VOLTS, _VOLTS_SD = 230.0, 0.8  # V of a phase; chosen
_CRITICAL, _NO_INPUT = HEALTH.index("critical"), 1  # psu.input_status: loss_of_input


class Psus:
    """Shares of all power supplies, which stay as they are; nothing goes from one block to the next."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = generator(seed, 55)
        self.layout, self.seed = layout, seed
        share = 1 + _SHARING * rng.uniform(-1, 1, (layout.nodes, PSUS))
        self._share: Floats = (share / share.sum(axis=1, keepdims=True)).astype(np.float32)

    def advance(self, block: int, power: NDArray[Any], effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class psu from the power of the GPUs."""
        rng, site = generator(self.seed, 56, block), effects.site
        shape = len(power), self.layout.nodes * PSUS
        draw = power.reshape(len(power), self.layout.nodes, -1).sum(axis=2, dtype=np.float32) + np.float32(HOST_W)
        lost = np.broadcast_to(site.psu_lost.values | site.psu_unfed.values, shape)
        noise = rng.standard_normal((2, *shape), np.float32)
        given = draw[:, :, None] * self._shares(site.psu_lost or site.psu_unfed, lost)
        unfed = np.broadcast_to(site.psu_unfed.values, shape)
        return {
            "psu.output_power": np.rint(given.reshape(shape) * (1 + np.float32(_NOISE) * noise[0])),
            "psu.input_voltage": np.where(unfed, np.float32(0), np.float32(_VOLTS) + np.float32(_VOLTS_SD) * noise[1]),
            "psu.status": np.where(lost, np.uint8(_CRITICAL), np.uint8(0)),
            "psu.input_status": np.where(unfed, np.uint8(_NO_INPUT), np.uint8(0)),
        }

    def _shares(self, touched: object, lost: NDArray[np.bool_]) -> NDArray[Any]:
        """(ticks or 1, nodes, supplies) share of the node's power that each gives; 0 where none is left to give."""
        if not touched:
            return self._share[None]
        gone = lost.reshape(len(lost), -1, PSUS)
        left = np.where(gone, np.float32(0), self._share)
        shared = left / np.maximum(left.sum(axis=2, keepdims=True), np.float32(1e-6))
        return np.asarray(np.where(gone.any(axis=2, keepdims=True), shared, self._share), np.float32)
