"""Names the cause of slow ranks: one GPU, a whole node, or none because the stage is slow; and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.streams import LEAST_COHORT, Bools, Floats
from detectors.straggler.causes import Cause, CauseTracker
from detectors.straggler.rank_slots import RankSlots
from pipeline.model.entity_names import entity_name, pager_title

_PART = 0.5  # share of a node's ranks that are slow together from which the node is blamed; chosen
_SOME = 0.25  # the same share that keeps it blamed, so that the blame does not flicker; chosen
_FEW = 8  # ranks of a stage below which two slow ones are too many for its median: they are suspects; as LEAST_PEERS
_ALIKE = 0.4  # share of the slowest one's slowdown from which others of its node are slow with it; chosen
_BEYOND = 0.5  # share of its slowdown that must be beyond that of the rest of its stage and node; chosen
_SURE, _NODE, _RANK, _ALL, _MANY = range(5)
_DOUBTS = ("", "no other node to compare", "no peer to compare", "all of its stage is slow", "half its stage is slow")
"""Why the stage itself may be slow, by the numbers above."""
_MOST_CAUSES = 3  # in the evidence; chosen


@dataclass(frozen=True)
class Suspicion:
    """One condition: `entity` is blamed for its slow `slots`. doubt: why the stage itself may be slow."""

    entity: str
    slots: tuple[int, ...]
    doubt: str = ""


def find_suspicions(
    slow: Bools,
    effect: Floats,
    counted: Bools,
    throttled: Bools,
    ranks: RankSlots,
    most: float,
    delta: float,
    known: Mapping[str, object],
) -> list[Suspicion]:
    """Returns nodes and ranks to blame.

    slow: have a condition.   effect: slowdown of each, relevant from `delta` on.   counted: could be slow.
    throttled: with many others of their stage, which does not excuse the healthy ones.   known: open conditions.
    """
    found = []
    lagging = slow | (effect >= delta)
    innocent, doubts = _judge_stages(slow, effect, lagging, counted, ranks, most)
    if throttled.any() and (slow & ~throttled).any():
        apart, more = _judge_stages(slow & ~throttled, effect, lagging, counted & ~throttled, ranks, most)
        innocent, doubts = np.where(throttled, innocent, apart), np.where(throttled, doubts, more)
    slow = slow & ~innocent & ~_slow_with_stage(slow, effect, counted, ranks, delta)
    nodes = ranks.numbers["node"]
    for node in np.unique(nodes[slow]).tolist():
        mine = slow & (nodes == node)
        if node >= 0 and (entity := ranks.entities["node"][node]):
            present = counted & (nodes == node)
            late = np.flatnonzero(lagging & present & ~innocent & (effect >= _ALIKE * effect[mine].max()))
            share = _SOME if entity in known else _PART
            if len(late) >= max(2.0, share * np.count_nonzero(present)):
                found.append(Suspicion(entity, tuple(late.tolist()), _DOUBTS[doubts[late].min()]))
                continue
        found += [Suspicion(ranks.ranks[i], (i,), _DOUBTS[doubts[i]]) for i in np.flatnonzero(mine).tolist()]
    return found


def _slow_with_stage(slow: Bools, effect: Floats, counted: Bools, ranks: RankSlots, delta: float) -> Bools:
    """Returns (S,) ranks that are compared with all of a job, and slow together with the rest of their stage and node.

    When a stage has more work for a while, the job's median moves, and each rank learns a little of that: as it ends,
    a few of them depart from their baseline by as much as matters, and all of their stage by a little less.
    """
    found = np.zeros(len(slow), bool)
    node, stage = ranks.numbers["node"], ranks.numbers["stage"]
    for mine, around in {(int(node[i]), int(stage[i])) for i in np.flatnonzero(slow & ranks.cross_stage)}:
        of_stage = counted & (stage == around)
        mates, ours = of_stage & (node != mine), of_stage & (node == mine)
        if mates.any() and np.count_nonzero(of_stage) >= LEAST_COHORT:
            others = min(float(np.median(effect[mates])), float(np.median(effect[ours])))
            alike = (others > (1 - _BEYOND) * effect) & (effect - others < delta)
            found |= slow & ours & alike
    return found


def _judge_stages(
    slow: Bools, effect: Floats, lagging: Bools, counted: Bools, ranks: RankSlots, most: float
) -> tuple[Bools, NDArray[np.int64]]:
    """Returns (S,) ranks of stages that are slow as a whole; and (S,) index into _DOUBTS where it may be the stage."""
    innocent, doubts = np.zeros(len(slow), bool), np.zeros(len(slow), np.int64)
    stages = np.where(ranks.numbers["stage"] >= 0, ranks.numbers["stage"], -2 - ranks.numbers["job"])
    for stage in np.unique(stages[slow]).tolist():
        members = counted & (stages == stage)
        late = lagging & members
        size = np.count_nonzero(members)
        if size < LEAST_COHORT:
            # its ranks are compared with the whole job: without an unchanged one, the stage may have more work
            if (effect[members] >= _ALIKE * effect[members].max(initial=0.0)).all():
                doubts[members] = _RANK if size == 1 else _ALL
            continue
        if np.count_nonzero(late) <= most * size:
            continue
        nodes = ranks.numbers["node"][members]
        if (nodes < 0).any():
            innocent |= members
            continue
        all_of, late_of = np.bincount(nodes), np.bincount(ranks.numbers["node"][late], minlength=int(nodes.max()) + 1)
        slow_nodes = np.count_nonzero(late_of > _PART * np.maximum(all_of, 1))
        all_nodes = np.count_nonzero(all_of)
        if all_nodes == 1:
            doubts[members] = _NODE
        elif slow_nodes > max(1.0, most * all_nodes) or (slow_nodes == 0 and all_nodes > 1):
            if size < _FEW and np.count_nonzero(late) < size:
                doubts[members] = _MANY
            else:
                innocent |= members
    return innocent, doubts


def collect_causes(suspicion: Suspicion, causes: CauseTracker, ranks: RankSlots, time: int) -> list[Cause]:
    """Returns what GPUs and node show, each cause once; of GPUs only what at least half of the slow ranks show."""
    by_key: dict[str, list[Cause]] = {}
    for slot in suspicion.slots:
        for cause in causes.gpu_causes(slot, ranks, time):
            by_key.setdefault(cause.key, []).append(cause)
    found = [same[0] for same in by_key.values() if len(same) >= _PART * len(suspicion.slots)]
    slot = suspicion.slots[0]
    return [*found, *causes.node_causes(ranks.ancestor("node", slot), ranks, slot)][:_MOST_CAUSES]


def describe_causes(found: Sequence[Cause]) -> str:
    """Returns the causes in full, for the evidence."""
    return "; ".join(cause.text for cause in found) if found else "cause not visible"


def write_title(suspicion: Suspicion, compared: Comparison, gpu: str | None, causes: Sequence[Cause]) -> str:
    """Returns the title: the entity, its slowdown, and the first cause or doubt."""
    percent = f"{100 * compared.effect:.0f} % slower"
    if suspicion.entity.startswith("node:"):
        text = f"{len(suspicion.slots)} ranks {percent}"
    else:
        text = f"{percent} on {entity_name(gpu)}" if gpu else percent
    note = causes[0].title if causes else suspicion.doubt
    return pager_title(suspicion.entity, f"{text}, {note}" if note else text)
