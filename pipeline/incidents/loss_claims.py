"""Which time and which restarts of a job incidents have counted, so that sums over incidents count nothing twice.

An incident may come to count a job after another has counted a part of the same time: it opened later, with an earlier
onset, or the job slowed down again. What one has counted stays with it. Times are event times (us).
"""

from __future__ import annotations

from collections.abc import Container

Span = tuple[int, int]
_MOST_SPANS = 64  # of an incident in a job; beyond them the two oldest become one; chosen: a slow job changes rarely


class LossClaims:
    """What each incident has counted of each job. Memory: a few spans per job that lost something, until it is
    forgotten."""

    def __init__(self) -> None:
        self._spans: dict[str, dict[str, list[Span]]] = {}  # job -> incident -> disjoint spans in order
        self._restarts: dict[str, dict[int, str]] = {}  # job -> time of a restart -> incident

    def take(self, job: str, start: int, end: int, incident: str) -> list[Span]:
        """Returns the parts of [start, end) that no other incident has counted; from now on this one has."""
        if end <= start:
            return []
        known = self._spans.setdefault(job, {})
        taken = sorted(span for other, spans in known.items() if other != incident for span in spans)
        free = list[Span]()
        at = start
        for first, last in taken:
            if last > at and first < end:
                free += [(at, first)] if first > at else []
                at = last
        free += [(at, end)] if at < end else []
        if free:
            known[incident] = _join(known.get(incident, []), free)
        return free

    def take_restart(self, job: str, at: int, incident: str) -> bool:
        """Returns whether this incident may count the restart of a job: no other has."""
        return self._restarts.setdefault(job, {}).setdefault(at, incident) == incident

    def release(self, job: str, after: int, incident: str) -> None:
        """Takes back what an incident has counted after a time."""
        known = self._spans.get(job, {})
        if incident in known:
            known[incident] = [(first, min(last, after)) for first, last in known[incident] if first < after]

    def hand_over(self, job: str, incident: str, into: str) -> None:
        """Gives what an incident has counted of a job to another one, into which it was merged."""
        known = self._spans.get(job, {})
        if spans := known.pop(incident, []):
            known[into] = _join(known.get(into, []), spans)
        restarts = self._restarts.get(job, {})
        restarts.update({at: into for at, counted_by in restarts.items() if counted_by == incident})

    def keep(self, jobs: Container[str]) -> None:
        """Forgets all jobs but these."""
        for job in [job for job in self._spans if job not in jobs]:
            del self._spans[job]
        for job in [job for job in self._restarts if job not in jobs]:
            del self._restarts[job]


def _join(spans: list[Span], more: list[Span]) -> list[Span]:
    """Returns the union of two lists of spans, in order."""
    made = list[Span]()
    for first, last in sorted([*spans, *more]):
        if made and first <= made[-1][1]:
            made[-1] = (made[-1][0], max(last, made[-1][1]))
        else:
            made.append((first, last))
    if len(made) > _MOST_SPANS:
        made[:2] = [(made[0][0], made[1][1])]
    return made
