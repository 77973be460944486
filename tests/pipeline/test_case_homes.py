"""Which incident gets the findings of a condition: one that has it, whatever people do, also after a restart."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.incidents.arrivals import RunningDesk
from pipeline.incidents.cases import Refused
from pipeline.model.records import SECOND, Finding, Level
from pipeline.model.topology import Topology
from tests.examples import examples

ENTITIES = ("node:n0", "gpu:n0.0", "gpu:n0.1", "node:n1", "gpu:n1.0", "rack:r0")
DETECTORS = ("thermal", "memory", "anomaly")
LEVELS: tuple[Level, ...] = ("suspect", "ticket", "page")
TOPOLOGY = Topology(
    {
        **{f"gpu:n{n}.{g}": (f"node:n{n}",) for n in range(2) for g in range(2)},
        **{f"node:n{n}": ("rack:r0",) for n in range(2)},
    }
)
Act = tuple[Any, ...]
WHICH, ENTITY, LEVEL = st.integers(0, 5), st.sampled_from(ENTITIES), st.sampled_from(LEVELS)
ACTS = st.one_of(
    st.tuples(st.just("report"), ENTITY, st.sampled_from(DETECTORS), LEVEL, st.booleans()),
    st.tuples(st.just("clear"), ENTITY, st.sampled_from(DETECTORS)),
    st.tuples(st.just("wait"), st.sampled_from((10, 130, 700, 2000))),
    st.tuples(st.just("resolve"), WHICH),
    st.tuples(st.just("reopen"), WHICH),
    st.tuples(st.just("merge"), WHICH, WHICH),
    st.tuples(st.just("split"), WHICH, st.sets(ENTITY, min_size=1, max_size=3)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("copy")),
)


class Play:
    """A Desk that people correct, and what goes on with it."""

    def __init__(self) -> None:
        self.desk, self.time = RunningDesk(TOPOLOGY), 1_790_000_000 * SECOND

    def do(self, act: Act) -> None:
        """Runs an act; what a Desk refuses changes nothing."""
        kind, *more = act
        self.time += 10 * SECOND
        with contextlib.suppress(Refused):
            getattr(self, kind)(*more)

    def observe(self, *findings: Finding) -> None:
        self.desk.observe(self.time, findings)

    def report(self, entity: str, detector: str, level: Level, anew: bool) -> None:
        onset = self.time if anew else 1_790_000_000 * SECOND
        self.observe(Finding(self.time, onset, entity, detector, level, 1.0, f"{entity}: {detector}"))

    def clear(self, entity: str, detector: str) -> None:
        self.observe(Finding(self.time, self.time, entity, detector, "suspect", 0.0, "well", {"cleared": True}))

    def wait(self, seconds: int) -> None:
        self.time += seconds * SECOND
        self.observe()

    def pick(self, which: int, *, is_open: bool = True) -> str:
        found = [id_ for id_, case in self.desk._cases.items() if case.is_open == is_open]
        if not found:
            raise Refused("none")
        return found[which % len(found)]

    def resolve(self, which: int) -> None:
        self.desk.resolve(self.pick(which), "ann", "x", self.time)

    def reopen(self, which: int) -> None:
        id_ = self.pick(which, is_open=False)
        self.desk.reopen(id_, "ann", "x", self.time)
        case = self.desk._cases[id_]
        assert {self.desk._case_ids[key] for key in case.conditions} == {id_}
        assert set(case.incident.members) <= {entity for _, entity in case.conditions}

    def merge(self, one: int, other: int) -> None:
        self.desk.merge(self.pick(one), [self.pick(other)], "ann", "x", self.time)

    def split(self, which: int, entities: set[str]) -> None:
        id_, before = self.pick(which), dict(self.desk._case_ids)
        self.desk.split(id_, entities, "ann", "x", self.time)
        for key, home in before.items():
            if home != id_ and self.desk._cases[home].is_open:
                assert self.desk._case_ids[key] == home, f"{key} of {home} was taken by a split of {id_}"

    def restart(self) -> None:
        known, before = self.desk.snapshot(), dict(self.desk._case_ids)
        self.desk = RunningDesk(TOPOLOGY)
        self.desk.restore(known)
        assert self.desk._case_ids == before, "a restart leads findings elsewhere"

    def copy(self) -> None:
        self.desk = self.desk.copy()

    def check(self) -> None:
        """A condition leads to an incident that has it."""
        for key, id_ in self.desk._case_ids.items():
            assert id_ in self.desk._cases, f"{key} leads to {id_}, which is gone"
            assert key in self.desk._cases[id_].conditions, f"{key} leads to {id_}, which does not have it"


def play(acts: Any) -> None:
    made = Play()
    for act in acts:
        made.do(act)
        made.check()


IN_ANOTHER = [
    ("report", "gpu:n0.1", "memory", "page", False),
    ("wait", 2000),
    ("report", "node:n0", "thermal", "page", False),
    ("report", "gpu:n0.1", "memory", "page", False),
    ("reopen", 0),
]
"""A finding whose incident ended joins the fault of its node; then a person reopens the old incident."""
SPLIT = [
    ("report", "node:n0", "memory", "page", False),
    ("report", "gpu:n0.1", "thermal", "page", True),
    ("split", 0, {"gpu:n0.1"}),
    ("report", "gpu:n1.0", "memory", "suspect", False),
    ("merge", 5, 1),
    ("wait", 700),
    ("report", "node:n0", "memory", "ticket", False),
    ("report", "gpu:n0.1", "thermal", "page", True),
    ("resolve", 0),
    ("restart",),
]
"""Two incidents have a condition after a split, a merge and an end, and only one of them gets its findings."""


@settings(max_examples=examples(60), deadline=None)
@example(IN_ANOTHER)
@example(SPLIT)
@given(st.lists(ACTS, min_size=1, max_size=25))
def test_whatever_people_do_a_condition_leads_to_an_incident_that_has_it(acts: list[Act]) -> None:
    play(acts)
