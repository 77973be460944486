"""Whether the newest checkpoint of a job is safe: not written while a device gave wrong results."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards import linked
from dashboards.jobs.answers import Harm, Job
from dashboards.links import as_markup, incident_link
from dashboards.markup import notice_of
from dashboards.words import age, clock
from pipeline.model.job_effect import read_doubt, split_doubt
from pipeline.model.records import SECOND

WRONG_RESULTS = "sdc"
"""Family of the detectors of wrong results: what a job wrote since may be wrong. A slow job writes right ones."""


def find_taint(job: Job, harms: Sequence[Harm]) -> Harm | None:
    """Returns the incident since whose first doubtful result the newest checkpoint was written: of several that whose
    doubt begins first; None if there is none.

    The end of an incident makes no result right: one that is resolved counts until the job starts again.
    """
    if job.checkpoint is None:
        return None
    tainted = [
        h
        for h in harms
        if (since := _wrong_since(h)) is not None
        and since <= job.checkpoint
        and (h.resolved is None or job.started <= h.resolved)
    ]
    return min(tainted, key=lambda h: _wrong_since(h) or 0, default=None)


def _wrong_since(harm: Harm) -> int | None:
    """Returns since when results may be wrong: since the last check that was right, 0 if none was; the onset of an open
    incident of wrong results that names no time; None if an incident puts none in doubt, or no longer does."""
    since = read_doubt(split_doubt(harm.basis)[0])  # also of an incident of another detector with wrong results in it
    if since is not None:
        return since
    named = harm.detector.partition("_")[0] == WRONG_RESULTS and harm.resolved is None  # else it was taken back
    return harm.onset if named else None


def tile(job: Job, harms: Sequence[Harm], now: int) -> str:
    """Returns the tile of the newest checkpoint."""
    if job.checkpoint is None:
        return linked.tile("none known", "since the last checkpoint", "work that a restart repeats", "none", "#events")
    text = age((now - job.checkpoint) / SECOND)
    if find_taint(job, harms) is None:
        return linked.tile(text, "since the last checkpoint", "work that a restart repeats", "none", "#events")
    return linked.tile(text, "since the last checkpoint", "not safe: results in doubt", "critical", "#harm")


def warning(job: Job, harms: Sequence[Harm], now: int) -> str:
    """Returns why the newest checkpoint is not safe and which one to take; empty if nothing speaks against it."""
    found = find_taint(job, harms)
    if found is None or job.checkpoint is None:
        return ""
    since, name = _wrong_since(found), as_markup(incident_link(found.id))
    written = f"It was written at {clock(job.checkpoint, now)}"
    if not since:
        text = f"{written}. Since when results may be wrong is not known ({name}): no checkpoint is known to be safe."
    else:
        text = (
            f"{written}; by incident {name}, results since {clock(since, now)} may be wrong. Restart from one that was "
            f"written before {clock(since, now)}."
        )
    return notice_of("The newest checkpoint is not safe.", text, "critical")
