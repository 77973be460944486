"""For an agent, a simulated node is a collector like any other."""

from __future__ import annotations

import numpy as np
import pytest

from agents.collector import NoData
from agents.sim.node import SimulatedNode
from pipeline.model.signals import CATALOGUE


def opened(**fields: int) -> SimulatedNode:
    node = SimulatedNode(now=lambda: 1_000_000, **fields)
    node.open("host")
    return node


def test_each_read_is_the_next_tick_of_one_node() -> None:
    node = opened(nodes=3, number=2, gpus=4)
    one, other = node.read(), node.read()
    classes = {r.device_class: r for r in one}
    assert set(classes) == {"gpu", "nvlink", "nic", "node", "sensor", "psu", "rank"}
    assert classes["gpu"].entities == tuple(f"gpu:sim-n002.{i}" for i in range(4))
    assert all(len(v) == len(r.entities) for r in one for v in r.columns.values())
    assert all(CATALOGUE[n].device_class == r.device_class for r in one for n in r.columns)
    energy = [
        next(r for r in look if r.device_class == "gpu").columns["gpu.energy"].astype(int) for look in (one, other)
    ]
    assert (energy[1] > energy[0]).all()


def test_the_same_seed_gives_the_same_readings() -> None:
    one, other = opened(seed=4).read(), opened(seed=4).read()
    for a, b in zip(one, other, strict=True):
        assert a.events == b.events
        assert all(np.array_equal(v, b.columns[n], equal_nan=v.dtype.kind == "f") for n, v in a.columns.items())


def test_the_inventory_has_the_parents_and_is_marked_as_simulated() -> None:
    devices = opened().inventory()
    assert devices["gpu:sim-n001.0"].parents == ("node:sim-n001",)
    assert devices["gpu:sim-n001.0"].attributes["simulated"] is True


def test_a_closed_or_unknown_node_has_no_data() -> None:
    node = opened()
    node.close()
    node.close()
    assert node.inventory() == {}
    with pytest.raises(NoData):
        node.read()
    with pytest.raises(NoData):
        opened(nodes=2, number=3)
