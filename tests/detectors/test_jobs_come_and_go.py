"""What detectors and root cause know of jobs follows each start and end, and equals what a new reader finds."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base.cohorts import AncestorIndex, Peers
from detectors.base.job_index import JobIndex
from detectors.straggler.gpu_placement import GpuPlacement
from detectors.straggler.rank_slots import RankSlots
from detectors.telemetry.silent_jobs import SilentJobs
from pipeline.incidents.factors import FactorIndex
from pipeline.model.membership import Membership
from pipeline.model.rank_changes import RankChanges
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.examples import examples

NODES, GPUS, JOBS, STAGES = 6, 4, 4, 2
START = 1_800_000_000 * SECOND
HARDWARE: dict[str, list[str]] = {f"gpu:n{n}.{g}": [f"node:n{n}"] for n in range(NODES) for g in range(GPUS)}
HARDWARE |= {f"node:n{n}": [f"rack:r{n // 3}"] for n in range(NODES)}
FACTS = {gpu: {"sku": "A" if gpu < "gpu:n3" else "B"} for gpu in HARDWARE if gpu.startswith("gpu:")}

Change = tuple[str, int, int, int, int]
changes: st.SearchStrategy[Change] = st.tuples(
    st.sampled_from(["start", "start", "start", "end", "inventory", "driver"]),
    st.integers(0, JOBS - 1),
    st.integers(0, NODES * GPUS - 1),  # first GPU
    st.integers(1, 3 * GPUS),  # ranks
    st.integers(0, STAGES),  # 0: without stages
)


class Site:
    """A topology that events change, and frames whose columns of ranks only grow."""

    def __init__(self) -> None:
        self.topology = Topology(HARDWARE, FACTS)
        self.membership = Membership(self.topology)
        self.ranks: dict[str, None] = {}
        self.time = START

    def apply(self, change: Change) -> None:
        kind, number, first, size, stages = change
        self.time += 10 * SECOND
        job = f"job:{number}"
        places = {f"rank:{number}.{r}": f"gpu:n{(first + r) // GPUS % NODES}.{(first + r) % GPUS}" for r in range(size)}
        if kind == "driver":
            gpu = f"gpu:n{first // GPUS}.{first % GPUS}"
            event = Event(
                self.time,
                f"node:n{first // GPUS}",
                "inventory",
                {"entities": {gpu: {"attributes": {"sku": str(size)}}}},
            )
        elif kind == "inventory":  # of one node, which says where its ranks are now
            node = f"n{first // GPUS}"
            mine = {rank: gpu for rank, gpu in places.items() if gpu.startswith(f"gpu:{node}.")}
            lines = {rank: {"parents": [job, gpu], "attributes": {"node": node}} for rank, gpu in mine.items()}
            event = Event(self.time, f"node:{node}", "inventory", {"entities": {job: {"parents": []}, **lines}})
            self.ranks |= dict.fromkeys(mine)
        elif kind == "start":
            stage = {"stage": f"stage:{number}.{stages}"} if stages else {}
            event = Event(
                self.time, job, "job_start", {"ranks": {r: {"gpu": gpu, **stage} for r, gpu in places.items()}}
            )
            self.ranks |= dict.fromkeys(places)
        else:
            event = Event(self.time, job, "job_end", {"ranks": list(places)} if stages else {})
        self.membership.apply_events([event])

    def frame(self, device_class: str) -> Frame:
        names = tuple(self.ranks) if device_class == "rank" else tuple(FACTS)
        return Frame(self.time, device_class, names, {}, self.topology, ())

    def copy(self) -> Topology:
        """Returns the same topology as an object that has never been read."""
        return Topology.from_checked(dict(self.topology.parents), dict(self.topology.attributes))


def described(placement: GpuPlacement | RankSlots) -> dict[str, Any]:
    """Returns everything that a placement says, as plain data."""
    arrays = {name: getattr(placement, name).tolist() for name in ("team", "groups", "pooled", "lone")}
    numbers = {kind: numbers.tolist() for kind, numbers in placement.numbers.items()}
    return {**arrays, "numbers": numbers, "entities": placement.entities, "cohorts": placement.cohorts}


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(changes, max_size=12))
def test_every_index_equals_that_of_a_new_reader(story: list[Change]) -> None:
    site = Site()
    peers, above, silent = Peers(("stage",), ("job",), ("@sku",), least=2), AncestorIndex("gpu"), SilentJobs()
    slots, gpus, factors = RankSlots(), GpuPlacement(), FactorIndex(site.topology)
    for change in story:
        site.apply(change)
        ranks, devices, fresh = site.frame("rank"), site.frame("gpu"), site.copy()
        same_ranks = Frame(site.time, "rank", ranks.entities, {}, fresh, ())
        same_devices = Frame(site.time, "gpu", devices.entities, {}, fresh, ())
        for ask in ("jobs_by_gpu", "jobs_by_node", "ranks_by_gpu"):
            assert getattr(JobIndex(), ask)(site.topology) == getattr(JobIndex(), ask)(fresh), ask
        new = Peers(*peers.rungs, least=2).kinds(same_ranks)
        assert peers.kinds(ranks)[1] == new[1]
        assert np.array_equal(peers.kinds(ranks)[0], new[0])
        expected = AncestorIndex("gpu").positions(same_ranks, same_devices)
        assert np.array_equal(above.positions(ranks, devices), expected)
        nodes, of_gpu, _ = JobIndex().places(devices, None)
        expected_nodes, expected_of_gpu, _ = JobIndex().places(same_devices, None)
        assert nodes == expected_nodes
        assert list(nodes) == list(expected_nodes)
        assert np.array_equal(of_gpu, expected_of_gpu)
        places, others = silent._places(ranks.entities, site.topology), SilentJobs()._places(ranks.entities, fresh)
        assert (places.number, places.jobs, [*places.ranks]) == (others.number, others.jobs, [*others.ranks])
        assert np.array_equal(places.nodes, others.nodes)
        before, mates = slots.snapshot(), gpus.snapshot()
        again, same_gpus = RankSlots(), GpuPlacement()
        again.restore(before)
        same_gpus.restore(mates)
        assert sorted(slots.update_slots(ranks)) == sorted(again.update_slots(same_ranks))
        assert slots.column.tolist() == again.column[: len(slots)].tolist()
        assert slots.names == again.names
        assert described(slots) == described(again)
        no_product = np.full(len(devices.entities), -1, np.int32)
        moved = gpus.update_topology(devices, no_product)
        expected_moved = same_gpus.update_topology(same_devices, no_product)
        assert expected_moved is not None
        assert moved is None or np.array_equal(moved, expected_moved)
        assert described(gpus) == described(same_gpus)
        index = FactorIndex(fresh)
        factors.refresh(site.time)
        index.refresh(site.time)
        fixed = {f for f in {*factors.units, *index.units} if f.startswith(("version:", "change:"))}
        assert {f: u for f, u in factors.units.items() if f not in fixed} == {
            f: u for f, u in index.units.items() if f not in fixed
        }
        kinds = ("rank", "stage", "job", "node", "gpu", "rack")
        assert [factors.number[kind] for kind in kinds] == [index.number[kind] for kind in kinds]
        for entity in (*factors.units, *FACTS):
            assert factors.around(entity) == index.around(entity)


def test_a_reader_learns_which_ranks_changed_and_reads_all_after_a_change_of_devices() -> None:
    site, reader = Site(), RankChanges()
    assert reader.read(site.topology) is None, "a new reader knows nothing"
    assert reader.read(site.topology) == ()
    site.apply(("start", 1, 0, 4, 1))
    assert set(reader.read(site.topology) or ()) == {*(f"rank:1.{r}" for r in range(4)), "stage:1.1"}
    site.apply(("driver", 0, 0, 1, 0))
    assert reader.read(site.topology) is None


def test_a_reader_that_is_too_far_behind_reads_all() -> None:
    site, reader = Site(), RankChanges()
    reader.read(site.topology)
    for _ in range(40):
        site.apply(("start", 1, 0, 2, 1))
        site.apply(("end", 1, 0, 2, 1))
    assert reader.read(site.topology) is None
    site.apply(("start", 1, 0, 2, 1))
    assert "rank:1.0" in (reader.read(site.topology) or ())
