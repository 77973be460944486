"""Topology: ancestors nearest first, peer groups, no circle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.errors import UsageError
from pipeline.model.topology import Topology, kind_of

FLEET = Topology(
    {
        "gpu:n1.0": ["node:n1"],
        "gpu:n2.0": ["node:n2"],
        "gpu:n3.0": ["node:n3"],
        "node:n1": ["rack:r1", "pdu:p1"],
        "node:n2": ["rack:r1"],
        "rack:r1": ["cdu:c1"],
    }
)


def test_ancestors_are_listed_nearest_first():
    assert FLEET.ancestors("gpu:n1.0") == ("node:n1", "rack:r1", "pdu:p1", "cdu:c1")
    assert FLEET.ancestor_of_kind("gpu:n1.0", "cdu") == "cdu:c1"
    assert FLEET.ancestor_of_kind("node:n1", "node") == "node:n1"
    assert FLEET.ancestor_of_kind("gpu:n3.0", "rack") is None


def test_ancestors_follow_the_newest_lines():
    topology = Topology({"gpu:1": ["node:1"], "disk:1": ["node:1"], "node:1": ["rack:1"]})
    assert topology.ancestors("gpu:1") == topology.ancestors("disk:1") == ("node:1", "rack:1")
    topology.merge({"node:1": ["rack:2"], "disk:1": ["node:2"]})
    assert topology.ancestors("gpu:1") == ("node:1", "rack:2")
    assert topology.ancestors("disk:1") == ("node:2",)


def test_all_entities_below_an_entity_are_found():
    assert set(FLEET.descendants("rack:r1")) == {"gpu:n1.0", "gpu:n2.0", "node:n1", "node:n2"}


def test_peers_share_a_group_number_and_other_entities_have_none():
    np.testing.assert_array_equal(FLEET.group_numbers(["gpu:n1.0", "gpu:n2.0", "gpu:n3.0"], "rack"), [0, 0, -1])


def test_a_circle_is_refused_and_changes_nothing():
    topology = Topology({"a:1": ["b:1"]})
    with pytest.raises(UsageError, match="b:1 -> a:1 -> b:1"):
        topology.merge({"b:1": ["a:1"]})
    assert topology.ancestors("a:1") == ("b:1",)
    with pytest.raises(UsageError, match="circle"):
        topology.merge({"c:1": ["c:1"]})


def test_only_a_change_raises_the_version():
    topology = Topology({"a:1": ["b:1"]}, {"a:1": {"sku": "x"}})
    before = topology.version
    assert not topology.merge({"a:1": ["b:1"]}, {"a:1": {"sku": "x"}})
    assert topology.version == before
    assert topology.merge({}, {"a:1": {"sku": "y"}})


def test_the_kind_is_the_part_before_the_first_colon():
    assert kind_of("port:leaf7.HundredGigE0/0/0/10:1") == "port"


@given(st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=3), max_size=12))
def test_any_parents_are_a_graph_without_a_circle_or_are_refused(lines):
    parents = {f"x:{child}": [f"x:{p}" for p in above] for child, above in lines.items()}
    try:
        topology = Topology(parents)
    except UsageError:
        return
    for entity in parents:
        assert entity not in topology.ancestors(entity)
