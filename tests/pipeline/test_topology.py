"""Topology: ancestors nearest first, peer groups, no circle."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model import topology
from pipeline.model.errors import UsageError
from pipeline.model.topology import ParentGraph, Topology, kind_of

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


def dense(width: int) -> dict[str, tuple[str, ...]]:
    """14 levels of entities, each below 16 of the next level."""
    return {
        f"a:{level}_{i}": tuple(f"a:{level + 1}_{(i + k) % width}" for k in range(16))
        for level in range(14)
        for i in range(width)
    }


@pytest.mark.parametrize("circles", [1, 3])
def test_a_circle_in_a_large_graph_is_found_soon_and_refuses_only_its_later_lines(circles):
    lines = dense(300)
    bad = {f"{x}:{i}": (f"{y}:{i}",) for i in range(circles) for x, y in ("xy", "yx")}
    whole = {**bad, **lines} if circles == 1 else {**lines, **bad}
    began, graph = time.process_time(), ParentGraph()
    refused = graph.set_valid(whole)
    assert list(refused) == [f"y:{i}" for i in range(circles)]
    assert all("form a circle" in why for why in refused.values())
    assert graph.parents == {entity: above for entity, above in whole.items() if entity not in refused}
    assert time.process_time() - began < 10


def test_very_many_circles_in_a_dense_graph_end_soon_and_leave_a_graph_without_any():
    lines = dense(60)
    upside = {f"a:14_{i}": (f"a:0_{i}",) for i in range(60)} | {f"b:{i}": (f"b:{i}x",) for i in range(100)}
    mixed = dict(pair for both in zip(lines.items(), [*upside.items()] * 8, strict=False) for pair in both)
    began, graph = time.process_time(), ParentGraph()
    refused = graph.set_valid({**mixed, **lines, **upside})
    assert len(refused) >= 60
    ParentGraph().check_parents(graph.parents)
    assert time.process_time() - began < 10


def test_lines_that_would_take_too_long_are_refused_unchecked(monkeypatch):
    monkeypatch.setattr(topology, "_LINE_VISITS", 0)
    monkeypatch.setattr(topology, "_VISITS", 10)
    lines = {"x:1": ("y:1",), "y:1": ("x:1",)} | {f"a:{i}": (f"b:{i}",) for i in range(20)}
    graph = ParentGraph()
    refused = graph.set_valid(lines)
    assert set(refused) | set(graph.parents) == set(lines)
    assert refused["a:19"].startswith("topology: not checked, as too many lines before")
    ParentGraph().check_parents(graph.parents)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([f"a:{i}" for i in range(9)]),
            st.lists(st.sampled_from([f"a:{i}" for i in range(12)]), max_size=3, unique=True).map(tuple),
            max_size=9,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_lines_are_refused_as_if_each_were_checked_alone_after_those_before(sets):
    graph, alone = ParentGraph(), ParentGraph()
    for lines in sets:
        fresh = {entity: above for entity, above in lines.items() if entity not in graph.parents}
        refused = graph.set_valid(fresh)
        one_by_one = [entity for entity, above in fresh.items() if alone.set_valid({entity: above})]
        assert list(refused) == one_by_one
        assert graph.parents == alone.parents
