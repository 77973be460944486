"""Peers are found on the first rung of the ladder that has enough of them."""

from __future__ import annotations

import numpy as np

from detectors.base.cohorts import Peers
from pipeline.judging.frames import Frame
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology


def frame(entities, topology):
    return Frame(SECOND, "gpu", tuple(entities), {"gpu.temperature": np.zeros(len(entities))}, topology)


def fleet(racks=2, per_rack=10, sku="H100"):
    gpus = [f"gpu:r{r}.{i}" for r in range(racks) for i in range(per_rack)]
    topology = Topology({g: [f"node:{g[4:]}"] for g in gpus} | {f"node:{g[4:]}": [f"rack:{g[4:6]}"] for g in gpus})
    topology.merge({}, {g: {"sku": sku} for g in gpus} | {f"node:{g[4:]}": {"driver": "570"} for g in gpus})
    return gpus, topology


def test_peers_share_rack_and_attributes():
    gpus, topology = fleet()
    peers, f = Peers(("rack", "@sku", "@driver"), least=8), frame(gpus, topology)
    groups = peers.groups(f)
    assert groups.tolist() == [0] * 10 + [1] * 10
    assert peers.cohort_name(f, 0) == "rack:r0, H100, 570"


def test_an_attribute_is_that_of_the_nearest_ancestor_with_it():
    gpus, topology = fleet()
    topology.merge({}, {gpus[0]: {"sku": "H100", "driver": "other"}})
    groups = Peers(("rack", "@sku", "@driver"), least=2).groups(frame(gpus, topology))
    assert groups[0] == -1
    assert set(groups[1:10]) == {groups[1]}


def test_with_too_few_peers_the_next_rung_counts():
    gpus, topology = fleet(racks=3, per_rack=4)
    f = frame(gpus, topology)
    assert Peers(("rack",), ("@sku",), least=8).groups(f).tolist() == [0] * 12
    assert Peers(("rack",), least=8).groups(f).tolist() == [-1] * 12
    assert Peers(("rack",), least=8).cohort_name(f, 0) == "own past"


def test_members_of_a_cohort_are_not_peers_on_the_next_rung():
    """A rack with enough stays a cohort; the rest of the fleet is compared among itself."""
    gpus, topology = fleet(racks=2, per_rack=10)
    few = [f"gpu:x{i}" for i in range(8)]
    topology.merge({g: [f"rack:x{i}"] for i, g in enumerate(few)}, {g: {"sku": "H100"} for g in few})
    groups = Peers(("rack",), ("@sku",), least=8).groups(frame([*gpus, *few], topology))
    assert groups.tolist() == [0] * 10 + [1] * 10 + [2] * 8


def test_the_same_array_is_returned_until_something_changes():
    gpus, topology = fleet()
    peers, f = Peers(("rack",), least=8), frame(gpus, topology)
    first = peers.groups(f)
    assert peers.groups(f) is first
    topology.merge({gpus[0]: ["rack:other"]})
    assert peers.groups(f) is not first
    assert peers.groups(f)[0] == -1
