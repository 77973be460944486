"""Incidents that a person split from each other: whatever they have in common, they are never merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.incidents.cases import Case, visibility_order


def are_apart(cases: Iterable[Case]) -> bool:
    """Returns whether a person split one of the cases from another of them."""
    ids = {case.incident.id for case in cases}
    return any(not ids.isdisjoint(case.apart - {case.incident.id}) for case in cases)


def keep_together(cause: str, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Returns the cases that a fold into the cause may take: none that a person split off, unless it has the cause.

    Of two that are apart the one that has the cause stays, else the one that people saw first.
    """
    if not any(case.apart for case in cases):
        return tuple(cases)
    taken: list[Case] = []
    may = [c for c in cases if not c.set_apart or c.incident.cause == cause]
    for case in sorted(may, key=lambda c: (c.incident.cause != cause, visibility_order(c))):
        if not any(are_apart((case, other)) for other in taken):
            taken.append(case)
    return tuple(case for case in cases if case in taken)
