"""Bursts: faults of many nodes together are explained in a few passes over all incidents, not in one pass per node."""

from __future__ import annotations

import pytest

from pipeline.incidents.causes import CauseRules
from pipeline.incidents.desk import Desk
from pipeline.incidents.merges import MergeProposal, take_independent
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND


def fleet(nodes: int, gpus: int) -> dict[str, tuple[str, ...]]:
    """GPUs of nodes, eight nodes in a rack, four racks in a row."""
    return {
        **{f"gpu:n{i}.{g}": (f"node:n{i}",) for i in range(nodes) for g in range(gpus)},
        **{f"node:n{i}": (f"rack:r{i // 8}",) for i in range(nodes)},
        **{f"rack:r{r}": (f"row:a{r // 4}",) for r in range(nodes // 8)},
    }


def xid(gpu: str) -> Finding:
    return Finding(
        time=START,
        onset=START,
        entity=gpu,
        detector="xid",
        level="page",
        score=1.0,
        summary=f"{gpu}: XID 79",
        signals=("gpu.xid",),
        evidence={},
    )


def test_a_burst_on_all_gpus_of_many_nodes_takes_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, propose = [0], CauseRules.propose_merges

    def count(*words: object) -> list[MergeProposal]:
        passes[0] += 1
        return propose(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(CauseRules, "propose_merges", count)
    known = fleet(64, 8)
    desk = Desk(Topology(known))
    desk.observe(START, [xid(entity) for entity in known if entity.startswith("gpu:")])
    assert {i.cause for i in desk.incidents.values()} == {f"node:n{i}" for i in range(64)}
    assert passes[0] <= 4


def proposal(desk: Desk, cause: str, *entities: str) -> MergeProposal:
    found = {i.entity: desk._cases[i.id] for i in desk.incidents.values()}
    return MergeProposal(cause, tuple(found[entity] for entity in entities))


@pytest.fixture
def apart() -> Desk:
    """Incidents of eight single GPUs in two racks."""
    desk = Desk(Topology(fleet(16, 2)))
    desk.observe(START, [xid(f"gpu:n{i}.0") for i in (0, 1, 2, 3, 8, 9, 10, 11)])
    return desk


def test_merges_of_other_places_are_done_in_one_pass(apart: Desk) -> None:
    one = proposal(apart, "node:n0", "gpu:n0.0")
    beside = proposal(apart, "node:n1", "gpu:n1.0")
    other = proposal(apart, "rack:r1", "gpu:n8.0", "gpu:n9.0")
    assert take_independent([one, beside, other], lambda case: apart._causes.causes_near(case.incident.entity)) == [
        one,
        beside,
        other,
    ]


def test_a_merge_waits_for_one_before_it_that_may_change_it(apart: Desk) -> None:
    def near(case: object) -> tuple[str, ...]:
        return apart._causes.causes_near(case.incident.entity)  # type: ignore[attr-defined]

    rack = proposal(apart, "rack:r0", "gpu:n0.0", "gpu:n1.0")
    below, above = proposal(apart, "node:n2", "gpu:n2.0"), proposal(apart, "row:a0", "gpu:n8.0", "gpu:n9.0")
    same = proposal(apart, "row:a9", "gpu:n1.0", "gpu:n10.0")
    far = proposal(apart, "node:n10", "gpu:n10.0")
    assert take_independent([rack, below, above, same, far], near) == [rack]  # `far` may be changed by `same`
    assert take_independent([], near) == []
