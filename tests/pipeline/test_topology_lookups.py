"""Cached look-ups of a Topology equal those of a new one, after any entities are added, removed and moved."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.model.errors import UsageError
from pipeline.model.topology import Topology
from tests.examples import examples

KINDS = ("rank", "stage", "gpu", "node", "rack")
NAMES = [f"{kind}:{number}" for kind in KINDS for number in range(3)]
NAME = st.sampled_from(NAMES)
LINES = st.dictionaries(NAME, st.lists(NAME, max_size=3), max_size=4)
CHANGES = st.lists(st.one_of(st.tuples(st.just("merge"), LINES), st.tuples(st.just("forget"), st.lists(NAME))))


def read_lookups(topology: Topology) -> list[object]:
    near = [topology.ancestor_of_kind(name, kind) for name in NAMES for kind in (*KINDS, "hall")]
    return [
        [topology.ancestors(name) for name in NAMES],
        near,
        [topology.group_numbers(NAMES, kind).tolist() for kind in KINDS],
    ]


@settings(max_examples=examples(200))
@given(CHANGES)
def test_look_ups_equal_those_of_a_new_topology(changes):
    topology = Topology()
    for what, change in changes:
        try:
            topology.remove_entities(change) if what == "forget" else topology.merge(change)
        except UsageError:
            continue  # a circle, which changes nothing
        assert read_lookups(topology) == read_lookups(Topology(topology.parents))


def test_jobs_that_start_and_end_and_ranks_that_move_leave_nothing_behind():
    topology = Topology({f"gpu:n{n}.0": [f"node:n{n}"] for n in range(8)})
    for job in range(500):
        ranks = {f"rank:{job}.{i}": [f"stage:{job}", f"gpu:n{i}.0"] for i in range(8)}
        topology.merge(ranks | {f"rank:moves.{i}": [f"gpu:n{(i + job) % 8}.0", f"cpu:{job}"] for i in range(8)})
        assert [topology.ancestor_of_kind(rank, "node") for rank in ranks] == [f"node:n{i}" for i in range(8)]
        assert topology.ancestors("rank:moves.0")[0] == f"gpu:n{job % 8}.0"
        topology.remove_entities(ranks)
    kept = [len(held) for held in vars(topology).values() if isinstance(held, (dict, set))]
    assert max(kept) <= 200
