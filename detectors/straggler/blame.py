"""Which rank, GPU or node is blamed for a slow job, and at which level, with and without step times.

Most slow jobs are slowed by their own work, not by a device (Lin et al., OSDI 2025: workers are the main cause in 1.7 %
of them). So no device is blamed where a stage is slow as a whole, or several parts of a job are, without a cause.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison
from detectors.base.streams import LEAST_COHORT, Bools, Floats
from detectors.straggler.gpu_placement import LEAST_PEERS, MOST_OF_COHORT, Placement
from detectors.straggler.gpu_readings import POLICY, Cause
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import Level

HARM, CORROBORATED = 0.08, 0.04
"""ln of the slowdown that is harm by itself, and that is with a physical cause: 10 and 5 % (SuperBench, ATC 2024: 5 %
below its baseline is defective), less two standard errors of a median of ten steps of 3 %."""
TENTH = float(np.log(1.1))  # ln of 10 %, of clocks, which are exact
STARTED = 2 * HARM
"""ln of the slowdown since the first sample that is worth a finding: half of that is within the spread of manufacture
(identical GPUs differ by at most 22 %; Sinha et al., SC 2022), and more work for experts or embeddings is common."""
_UNLIKE = float(np.log(1.22))
"""ln of the slowdown since the first sample that no spread of manufacture explains (Sinha et al., SC 2022)."""
_SLIGHT = 0.03  # ln of the slowdown below which statistics alone mean nothing; as delta of the detectors
_PART = 0.5  # share of a node's members that are slow together from which the node is blamed; chosen
_SOME = 0.25  # the same share that keeps it blamed, so that the blame does not flicker; chosen
_ALIKE = 0.4  # share of the slowest one's slowdown from which others of its node are slow with it; chosen
_DOUBTS = ("", "no other node to compare", "no peer to compare", "all of its stage is slow")
_NODE, _RANK, _ALL = 1, 2, 3  # positions in _DOUBTS


@dataclass(frozen=True)
class Suspicion:
    """One condition: `entity` is blamed for its slow `slots`. doubt: why the stage itself may be slow.

    whole: all members on its node are slow.
    """

    entity: str
    slots: NDArray[np.intp]
    doubt: str = ""
    whole: bool = False

    @property
    def single(self) -> bool:
        """Whether it blames a part of a node: a whole node is slow for minutes by garbage collection or neighbours."""
        return not self.entity.startswith("node:")


def find_suspicions(
    slow: Bools, effect: Floats, counted: Bools, units: Placement, delta: float, known: Collection[str]
) -> list[Suspicion]:
    """Returns nodes and members to blame.

    slow: have a condition.   effect: slowdown of each, relevant from `delta` on.   counted: could be slow.
    known: entities with an open condition.
    """
    found = []
    lagging = slow | (effect >= delta)
    innocent, doubts = _judge_teams(slow, effect, lagging, counted, units)
    slow = slow & ~innocent
    nodes = units.numbers["node"]
    for node in np.unique(nodes[slow]).tolist():
        mine = slow & (nodes == node)
        if node >= 0 and (entity := units.entities["node"][node]):
            present = counted & (nodes == node)
            late = np.flatnonzero(lagging & present & ~innocent & (effect >= _ALIKE * effect[mine].max()))
            share = _SOME if entity in known else _PART
            if len(late) >= max(2.0, share * np.count_nonzero(present)):
                doubt = _DOUBTS[doubts[late].min()]
                found.append(Suspicion(entity, late, doubt, len(late) == np.count_nonzero(present)))
                continue
        found += [Suspicion(units.names[i], np.array([i]), _DOUBTS[doubts[i]]) for i in np.flatnonzero(mine).tolist()]
    return found


def _judge_teams(
    slow: Bools, effect: Floats, lagging: Bools, counted: Bools, units: Placement
) -> tuple[Bools, NDArray[np.int64]]:
    """Returns (S,) members of teams that are slow as a whole; and (S,) index into _DOUBTS where it may be the team."""
    innocent, doubts = np.zeros(len(slow), bool), np.zeros(len(slow), np.int64)
    for team in np.unique(units.team[slow]).tolist():
        members = counted & (units.team == team)
        late, size = lagging & members, np.count_nonzero(members)
        if size < LEAST_COHORT:
            # compared with the whole job: without an unchanged one, the stage may have more work
            if (effect[members] >= _ALIKE * effect[members].max(initial=0.0)).all():
                doubts[members] = _RANK if size == 1 else _ALL
            continue
        if np.count_nonzero(late) <= MOST_OF_COHORT * size:
            continue
        nodes = units.numbers["node"][members]
        if (nodes < 0).any():
            innocent |= members
            continue
        all_of = np.bincount(nodes)
        late_of = np.bincount(units.numbers["node"][late], minlength=len(all_of))
        slow_nodes, all_nodes = np.count_nonzero(late_of > _PART * np.maximum(all_of, 1)), np.count_nonzero(all_of)
        if all_nodes == 1:
            doubts[members] = _NODE
        elif slow_nodes > max(1.0, MOST_OF_COHORT * all_nodes) or slow_nodes == 0:
            innocent |= members
    return innocent, doubts


@dataclass(frozen=True, slots=True)
class Weight:
    """What decides a level. cost: ln of the slowdown.   held: s for which it lasts.   peers: it is compared with.

    alone:   no other part of the job is slow without a cause.   waits: the job waits for it.
    started: slow since its first sample: more work or a slow device.
    """

    cost: float
    held: float
    peers: int
    alone: bool
    waits: bool
    started: bool = False


def decide_level(
    suspicion: Suspicion, causes: Sequence[Cause], weight: Weight, hold: float, ticket_hold: float
) -> Level:
    """Returns page for harm: 10 % that lasts for `hold` s and for which the job waits; 5 % with a fact of the device;
    10 % immediately with a clock that is as low.

    Ticket after `ticket_hold` s for a slow rank or GPU, after `hold` s for a node. A power cap is intended: suspect,
    and so are a few percent of clock of a whole node. A clock that is not as low does not explain the slowdown.
    """
    cost, held = weight.cost, weight.held
    quick = suspicion.single and cost >= HARM and held >= ticket_hold
    if any(cause.key == POLICY for cause in causes):
        return "suspect"
    clock = max((cause.value for cause in causes if cause.physical and cause.is_clock), default=0.0)
    if any(cause.physical and not cause.is_clock for cause in causes) and cost >= CORROBORATED:
        return "page"
    if min(cost, -np.log1p(-min(clock, 0.99))) >= TENTH:
        return "page"
    if max(cost, clock) < TENTH and clock and not suspicion.single:
        return "suspect"  # of a whole node: another firmware or setting
    if any(cause.physical for cause in causes):
        return "ticket" if held >= hold and cost >= _SLIGHT else "suspect"
    if weight.started and cost < _UNLIKE:
        return "ticket" if weight.alone and held >= ticket_hold and cost >= STARTED else "suspect"
    if not causes and (suspicion.doubt or not weight.alone):
        return "suspect"
    told = any(not cause.is_clock for cause in causes)  # what people set explains a clock, so that it proves nothing
    unexplained = cost + np.log1p(-max((c.value for c in causes if c.is_clock and c.intended), default=0.0))
    if held >= hold and cost >= (CORROBORATED if told else HARM):
        return "page" if told or (weight.waits and weight.peers + 1 >= LEAST_PEERS) else "ticket"
    return "ticket" if quick or (held >= hold and unexplained >= CORROBORATED) else "suspect"


def write_title(
    suspicion: Suspicion, compared: Comparison, gpu: str | None, causes: Sequence[Cause], started: bool
) -> str:
    """Returns the title: the entity, its slowdown, and the first cause or doubt."""
    percent = f"{100 * compared.effect:.0f} % slower"
    if suspicion.single:
        text = f"{percent} on {entity_name(gpu)}" if gpu else percent
    else:
        text = f"{len(suspicion.slots)} ranks {percent}"
    note = causes[0].title if causes else suspicion.doubt or ("since start" if started else "")
    return pager_title(suspicion.entity, f"{text}, {note}" if note else text)
