"""Merges of incidents with a common cause, and which of them may be done together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.incidents.cases import Case


@dataclass(frozen=True, slots=True)
class MergeProposal:
    """Cases to merge, since `cause` explains all of them. reason: why, where no finding names the cause."""

    cause: str
    cases: tuple[Case, ...]
    reason: str = ""


def take_independent(
    proposals: Sequence[MergeProposal], list_causes: Callable[[Case], Iterable[str]]
) -> list[MergeProposal]:
    """Returns the first proposal, and each later one that none before it can change: it has other cases, none of which
    is below the cause of one before, and its own cause is above none of theirs. So a burst on many nodes takes few
    passes. Where what one merge takes in would change the odds of a cause that no proposal has, one merge a pass may
    blame another one (11 of 300 random worlds).

    list_causes: all possible causes of a case.
    """
    found, causes, cases, above = list[MergeProposal](), set[str](), set[str](), set[str]()
    for one in proposals:
        ids = {case.incident.id for case in one.cases}
        over = {e for case in one.cases for e in (case.incident.cause, *list_causes(case))}
        if cases.isdisjoint(ids) and causes.isdisjoint(over) and one.cause not in above:
            found.append(one)
        causes.add(one.cause)
        cases |= ids
        above |= over
    return found
