"""Counter generations: which counters restart, and how agents report it.

After a reboot an agent has no history: it sends no event, and the generation is new. A device that is reset while its
node stays up also causes the event counter_reset (agents/node/counter_generations.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.state import State
from pipeline.model.signals import CATALOGUE

CLASSES = ("gpu", "nvlink", "nic", "node")
"""Classes of a node's own counters."""


def resets(effects: Effects, device_class: str) -> NDArray[np.bool_] | None:
    """Returns (ticks, devices) which restart in a tick; None: none. A GPU, its NVLink and port have the same
    numbers."""
    own = _own(effects, device_class)
    booted = effects.node.reset
    if not booted:
        return own
    if device_class == "node":
        return booted.array()
    of_node: NDArray[np.bool_] = booted.array()[:, effects.layout.node_of_gpu]
    return of_node if own is None else of_node | own


def _own(effects: Effects, device_class: str) -> NDArray[np.bool_] | None:
    """Returns the resets of the devices themselves, while their nodes stay up."""
    channel = {"gpu": effects.gpu.reset, "nvlink": effects.gpu.reset, "nic": effects.port.reset}.get(device_class)
    return channel.array() if channel else None


class CounterGenerations:
    """Start of each device's current counter generation: s after the start of the scenario."""

    def __init__(self, layout: Layout, state: State) -> None:
        self.layout, self.state = layout, state
        for device_class in CLASSES:
            state[f"lives.{device_class}"] = np.zeros(len(layout.entities[device_class]), np.int64)

    def readings(self) -> dict[str, NDArray[Any]]:
        """Returns the last readings of all counters before a block, by signal."""
        return {name.removeprefix("counter."): v for name, v in self.state.items() if name.startswith("counter.")}

    def add_columns(
        self,
        columns: Mapping[str, dict[str, NDArray[Any]]],
        before: Mapping[str, NDArray[Any]],
        effects: Effects,
        start: int,
    ) -> None:
        """Adds the columns CLASS.generation, UTC s, and the events of devices that were reset; `start` in UTC s."""
        for device_class in CLASSES:
            block = columns.get(device_class, {})
            counting = [name for name in block if CATALOGUE[name].kind == "counter"]
            if not counting:
                continue
            since = self._since(device_class, effects)
            block[f"{device_class}.generation"] = (since + start).astype(np.uint32)
            for tick, device in _reported_resets(effects, device_class):
                fell = [n for n in counting if _fell(block[n], before.get(n), tick, device)]
                if fell:
                    entity = self.layout.entities[device_class][device]
                    effects.add_event(float(effects.time[tick]), entity, "counter_reset", signals=fell)

    def _since(self, device_class: str, effects: Effects) -> NDArray[np.int64]:
        """Returns (ticks, devices) the start of the generation that a reading belongs to."""
        key, restarted = f"lives.{device_class}", resets(effects, device_class)
        since = np.broadcast_to(self.state[key], (len(effects.time), len(self.state[key])))
        if restarted is not None:
            begun = np.where(restarted, effects.time[:, None].astype(np.int64), 0)
            since = np.maximum(np.maximum.accumulate(begun, axis=0), since)
            self.state[key] = since[-1].copy()
        return since


def _reported_resets(effects: Effects, device_class: str) -> list[tuple[int, int]]:
    """Returns (tick, device) of the resets that a running agent reports."""
    own = _own(effects, device_class)
    if own is None:
        return []
    if effects.node.reset:
        own = own & ~effects.node.reset.array()[:, effects.layout.node_of_gpu]
    return [(tick, device) for tick, device in np.argwhere(own).tolist()]


def _fell(values: NDArray[Any], before: NDArray[Any] | None, tick: int, device: int) -> bool:
    last = values[tick - 1, device] if tick else None if before is None else before[device]
    return last is not None and int(values[tick, device]) < int(last)
