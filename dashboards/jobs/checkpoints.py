"""Whether the newest checkpoint of a job is safe: not written while a device gave wrong results."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards import linked
from dashboards.jobs.answers import Harm, Job
from dashboards.links import as_markup, incident_link
from dashboards.markup import notice_of
from dashboards.words import age, clock
from pipeline.model.records import SECOND

WRONG_RESULTS = "sdc"
"""Family of the detectors of wrong results: what a job wrote since may be wrong. A slow job writes right ones."""


def find_taint(job: Job, harms: Sequence[Harm]) -> Harm | None:
    """Returns the incident with wrong results during which the newest checkpoint was written: of several that with the
    earliest onset; None if there is none."""
    if job.checkpoint is None:
        return None
    tainted = [
        h
        for h in harms
        if h.detector.partition("_")[0] == WRONG_RESULTS
        and h.onset <= job.checkpoint
        and (h.resolved is None or job.checkpoint <= h.resolved)
    ]
    return min(tainted, key=lambda h: h.onset, default=None)


def tile(job: Job, harms: Sequence[Harm], now: int) -> str:
    """Returns the tile of the newest checkpoint."""
    if job.checkpoint is None:
        return linked.tile("none known", "since the last checkpoint", "work that a restart repeats", "none", "#events")
    text = age((now - job.checkpoint) / SECOND)
    if find_taint(job, harms) is None:
        return linked.tile(text, "since the last checkpoint", "work that a restart repeats", "none", "#events")
    return linked.tile(text, "since the last checkpoint", "not safe: wrong results before it", "critical", "#harm")


def warning(job: Job, harms: Sequence[Harm], now: int) -> str:
    """Returns why the newest checkpoint is not safe and which one to take; empty if nothing speaks against it."""
    found = find_taint(job, harms)
    if found is None or job.checkpoint is None:
        return ""
    onset, name = clock(found.onset, now), as_markup(incident_link(found.id))
    text = (
        f"It was written at {clock(job.checkpoint, now)}, after the onset of incident {name} ({onset}), and may "
        f"contain wrong results. Restart from one that was written before {onset}."
    )
    return notice_of("The newest checkpoint is not safe.", text, "critical")
