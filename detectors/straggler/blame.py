"""Who is to blame for slow ranks: one GPU, a whole node, or nobody because the stage is slow; and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.streams import LEAST_COHORT, Bools, Floats
from detectors.straggler.causes import Cause, CauseTracker
from detectors.straggler.rank_slots import RankSlots

_PART = 0.5  # of a node's ranks that are slow together: then the node is slow, not its GPUs one by one; chosen
_SOME = 0.25  # of them that keep it blamed, so that the blame does not flicker; chosen
_FEW = 8  # ranks of a stage below which two slow ones are too many for its median: they are suspects; as PEERS has it
_ALIKE = 0.4  # of the slowest one's slowdown that the others of its node must share to be slow with it; chosen
_BEYOND = 0.5  # of its slowdown, less than which is its own beyond what the rest of its stage and node show; chosen
_SURE, _NODE, _RANK, _ALL, _MANY = range(5)
_DOUBTS = (
    *("", "no other node of its stage can tell", "no other rank of its stage can tell"),
    *("all ranks of its stage are slow", "too many of its stage's few ranks are slow"),
)
_TOLD = 3  # causes in one sentence; chosen


@dataclass(frozen=True)
class Suspicion:
    """One condition: `entity` is blamed for its slow `slots`. unsure: why the stage itself may be slow as well."""

    entity: str
    slots: tuple[int, ...]
    doubt: str = ""


def find_suspicions(
    slow: Bools,
    effect: Floats,
    counted: Bools,
    sick: Bools,
    places: RankSlots,
    most: float,
    delta: float,
    known: Mapping[str, object],
) -> list[Suspicion]:
    """Nodes and ranks to blame. slow: have a condition; effect: by how much each is slow, of matter from `delta` on;
    counted: who could be; sick: slow as many of their stage are, and no excuse for those that are well."""
    found = []
    lagging = slow | (effect >= delta)
    innocent, unsure = _judge_stages(slow, effect, lagging, counted, places, most)
    if sick.any() and (slow & ~sick).any():
        apart, doubts = _judge_stages(slow & ~sick, effect, lagging, counted & ~sick, places, most)
        innocent, unsure = np.where(sick, innocent, apart), np.where(sick, unsure, doubts)
    slow = slow & ~innocent & ~_slow_with_stage(slow, effect, counted, places, delta)
    for node in np.unique(places.numbers["node"][slow]).tolist():
        mine = slow & (places.numbers["node"] == node)
        if node >= 0 and (entity := places.entities["node"][node]):
            there = counted & (places.numbers["node"] == node)
            late = np.flatnonzero(lagging & there & ~innocent & (effect >= _ALIKE * effect[mine].max()))
            share = _SOME if entity in known else _PART
            if len(late) >= max(2.0, share * np.count_nonzero(there)):
                found.append(Suspicion(entity, tuple(late.tolist()), _DOUBTS[unsure[late].min()]))
                continue
        found += [Suspicion(places.ranks[i], (i,), _DOUBTS[unsure[i]]) for i in np.flatnonzero(mine).tolist()]
    return found


def _slow_with_stage(slow: Bools, effect: Floats, counted: Bools, places: RankSlots, delta: float) -> Bools:
    """Ranks that are compared with all of a job, and slow together with the rest of their stage and of their node.

    When a stage has more work for a while, the job's median moves, and each rank learns a little of that: as it ends,
    a few of them depart from what they have learnt by as much as matters, and all of their stage by a little less.
    """
    found = np.zeros(len(slow), bool)
    node, stage = places.numbers["node"], places.numbers["stage"]
    for mine, around in {(int(node[i]), int(stage[i])) for i in np.flatnonzero(slow & places.cross_stage)}:
        of_stage = counted & (stage == around)
        mates, ours = of_stage & (node != mine), of_stage & (node == mine)
        if mates.any() and np.count_nonzero(of_stage) >= LEAST_COHORT:
            others = min(float(np.median(effect[mates])), float(np.median(effect[ours])))
            alike = (others > (1 - _BEYOND) * effect) & (effect - others < delta)
            found |= slow & ours & alike
    return found


def _judge_stages(
    slow: Bools, effect: Floats, lagging: Bools, counted: Bools, places: RankSlots, most: float
) -> tuple[Bools, NDArray[np.int64]]:
    """Ranks of stages that are slow as a whole; and (S,) place in _UNSURE where nobody can tell rank from stage."""
    innocent, unsure = np.zeros(len(slow), bool), np.zeros(len(slow), np.int64)
    stages = np.where(places.numbers["stage"] >= 0, places.numbers["stage"], -2 - places.numbers["job"])
    for stage in np.unique(stages[slow]).tolist():
        members = counted & (stages == stage)
        late = lagging & members
        size = np.count_nonzero(members)
        if size < LEAST_COHORT:
            # its ranks are compared with the whole job: without one that is as it was, the stage may have more work
            if (effect[members] >= _ALIKE * effect[members].max(initial=0.0)).all():
                unsure[members] = _RANK if size == 1 else _ALL
            continue
        if np.count_nonzero(late) <= most * size:
            continue
        nodes = places.numbers["node"][members]
        if (nodes < 0).any():
            innocent |= members
            continue
        all_of, late_of = np.bincount(nodes), np.bincount(places.numbers["node"][late], minlength=int(nodes.max()) + 1)
        struck = np.count_nonzero(late_of > _PART * np.maximum(all_of, 1))
        there = np.count_nonzero(all_of)
        if there == 1:
            unsure[members] = _NODE
        elif struck > max(1.0, most * there) or (struck == 0 and there > 1):
            if size < _FEW and np.count_nonzero(late) < size:
                unsure[members] = _MANY
            else:
                innocent |= members
    return innocent, unsure


def collect_causes(suspicion: Suspicion, causes: CauseTracker, places: RankSlots, time: int) -> list[Cause]:
    """What GPUs and node show, each thing once; of a node only what at least half of its slow ranks show."""
    by_key: dict[str, list[Cause]] = {}
    for slot in suspicion.slots:
        for cause in causes.gpu_causes(slot, places, time):
            by_key.setdefault(cause.key, []).append(cause)
    found = [same[0] for same in by_key.values() if len(same) >= _PART * len(suspicion.slots)]
    slot = suspicion.slots[0]
    return [*found, *causes.node_causes(places.ancestor("node", slot), places, slot)][:_TOLD]


def describe_causes(found: Sequence[Cause]) -> str:
    """Causes for a sentence."""
    return "; ".join(cause.text for cause in found) if found else "cause not visible"


def write_title(suspicion: Suspicion, compared: Comparison, around: Mapping[str, str], seen: Sequence[Cause]) -> str:
    """What an engineer reads: who is slow by how much, beside whom, and why."""
    whole = suspicion.entity.startswith("node:")
    who = (
        f"{_plural(len(suspicion.slots), 'rank')} on {suspicion.entity} compute up to"
        if whole
        else f"{suspicion.entity} computes"
    )
    where = f" on {around['gpu']}" if "gpu" in around and not whole else ""
    beside = (
        f"{_plural(compared.peers, 'other rank')} of {compared.cohort} lead one to expect"
        if compared.peers
        else "it did before"
    )
    told = f"{100 * compared.effect:.0f} % longer than {beside}"
    told += f": {compared.value:.3g} s a step, not {compared.expected:.3g} s"
    unsure = f"; {suspicion.doubt}, so the stage itself may be slow" if suspicion.doubt else ""
    return f"{who.replace(' computes', where + ' computes')} {told}{unsure}; {describe_causes(seen)}"


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number != 1 else "")
