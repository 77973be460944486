"""`/jobs`: all jobs. `/jobs?entity=job:81` (or a rank or stage): one job, with its pace and the strip of its ranks."""

from __future__ import annotations

from urllib.parse import quote

import streamlit as st

from dashboards import linked, routes, snapshot
from dashboards import markup as common
from dashboards.evidence import TIME_GRID
from dashboards.jobs import checkpoints, markup
from dashboards.jobs.answers import Job, JobDetail, JobList, Strip, parse_job, parse_jobs, parse_strip
from dashboards.rank_strip.component import rank_strip
from dashboards.snapshot import CachedAnswer
from dashboards.theme import PALETTES
from dashboards.views import parts
from dashboards.words import amount
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND
from pipeline.runtime.guides import guide

RANGES = {"1h": 1.0, "6h": 6.0, "24h": 24.0}
"""Name in the address -> hours of the strip and of the step time."""
EVENT_RANGE = 24 * 3600 * SECOND
"""Time of which events are listed (us). Chosen."""


def page() -> None:
    """Draws the page."""
    entity = st.query_params.get("entity", "")
    if not entity:
        st.text_input(
            "Filter",
            key="q",
            bind="query-params",
            placeholder="Job, name, user, account or node",
            icon=":material/search:",
        )
    parts.draw_refreshing(lambda: _one(entity) if entity else _all())


def _all() -> None:
    answer = snapshot.fetch(parse_jobs, "jobs")
    if answer.value is None:
        parts.draw_head("Jobs unknown", [], "", answer)
        parts.draw_error(answer)
        return
    found: JobList = answer.value
    parts.draw_head(markup.headline(found.jobs), [], "", answer, of_now=True)
    parts.draw_error(answer)
    if not found.jobs:
        text = "Jobs appear when the agent's collector jobs sees ranks of Slurm, Kubernetes or torchrun: "
        text += guide("jobs.md")
        st.html(common.notice(text, "quiet", "Next:"))
        return
    st.html(markup.overview(found.jobs))
    chosen = markup.sort_jobs(markup.find_jobs(found.jobs, st.session_state.get("q") or ""))
    st.html(markup.table(chosen, found.as_of))
    if len(chosen) > markup.MAX_ROWS:
        more = len(chosen) - markup.MAX_ROWS
        st.html(
            common.notice(f"{amount(more, 'more job is', 'more jobs are')} not listed; filter by name, user or node.")
        )


def job_of(entity: str) -> str:
    """Returns the job of a job, rank or stage; "" for anything else."""
    kind, _, name = entity.partition(":")
    if kind in ("rank", "stage"):
        name = name.rpartition(".")[0] or name
    return f"job:{name}" if kind in ("job", "rank", "stage") and name else ""


def _one(entity: str) -> None:
    job = job_of(entity)
    if not job:
        st.html(common.title("Jobs"))
        st.html(common.notice("Expected a job, rank or stage in the address, such as entity=job:81.", "degraded"))
        return
    hours = RANGES[_range()]
    answer = snapshot.fetch(parse_job, f"jobs/{quote(job, safe='')}", hours=str(hours))
    crumbs = markup.crumbs(entity_name(job))
    if answer.value is None:
        text = f"{entity_name(job)} is not known" if answer.status == 404 else f"State of {entity_name(job)} unknown"
        parts.draw_head(text, [], "", answer, crumbs=crumbs)
        if answer.status == 404:
            st.html(common.notice("It may have ended before the retention, or belong to another site."))
        else:
            parts.draw_error(answer)
        return
    detail = answer.value
    strip = _fetch_strip(job, hours) if detail.job.state != "ended" else None
    badges, simulated = [markup.state_badge(detail.job)], detail.job.simulated
    below = " · ".join(filter(None, (detail.job.scheduler, detail.job.user, detail.job.account)))
    text = markup.job_headline(detail.job, strip.value if strip else None)
    parts.draw_head(text, badges, below, answer, of_now=True, crumbs=crumbs, simulated=simulated)
    parts.draw_error(answer)
    _details(entity, detail, strip, answer)


def _range() -> str:
    asked = st.query_params.get("range", "1h")
    return asked if asked in RANGES else "1h"


def _fetch_strip(job: str, hours: float) -> CachedAnswer[Strip]:
    """Returns the strip of the ranks in the address: `first` and `ranks`, all without them."""
    query = {"job": job, "hours": str(hours)}
    for name in ("first", "ranks"):
        value = st.query_params.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 8 and (name == "first" or int(value)):
            query[name] = value
    return snapshot.fetch(parse_strip, "rank-strip", **query)


def _details(
    entity: str, detail: JobDetail, strip: CachedAnswer[Strip] | None, answer: CachedAnswer[JobDetail]
) -> None:
    job, now = detail.job, answer.fetched
    st.html(markup.job_tiles(job, detail.harmed_by, now))
    if text := checkpoints.warning(job, detail.harmed_by, now):
        st.html(text)
    if strip is not None:
        _draw_strip(entity, job, strip)
    st.html(linked.anchor("harm") + common.section("Incidents", "what reached this job, and what that cost it"))
    st.html(markup.harms(detail.harmed_by, now))
    _draw_pace(detail)
    fleet = snapshot.fetch_fleet()
    left, right = st.columns(2, gap="medium")
    with left:
        st.html(linked.anchor("nodes") + common.section("Nodes"))
        parts.draw_problem(fleet, "State of the nodes unknown.")
        st.html(markup.nodes(job, None if fleet.value is None else fleet.value.nodes))
    with right:
        end = now // TIME_GRID * TIME_GRID
        items = snapshot.fetch_timeline(job.job, end - EVENT_RANGE, end)
        st.html(linked.anchor("events") + common.section("Events", "of the last 24 h, and runs"))
        parts.draw_problem(items, "Events unknown.")
        st.html(markup.events(detail, items.value or (), now))


def _draw_strip(entity: str, job: Job, answer: CachedAnswer[Strip]) -> None:
    strip = answer.value
    note = "" if strip is None else f"compute time of {strip.ranks:,} ranks against the median of their stage"
    st.html(linked.anchor("ranks") + common.section("Ranks over time", note))
    _draw_range()
    if strip is None:
        if answer.status == 404:
            st.html(common.notice("No rank of this job is known now."))
        else:
            parts.draw_error(answer)
        return
    if strip.first_rank or "ranks" in st.query_params:
        last = strip.first_rank + strip.rows * strip.per_row - 1
        st.html(
            f'<p class="fp-empty">Ranks {strip.first_rank:,} to {min(last, strip.ranks - 1):,} of {strip.ranks:,} · '
            f"{linked.link('all ranks', routes.href('jobs', entity=job.job, range=_range()))}</p>"
        )
    if strip.measured is not None:
        group = routes.href("jobs", entity=job.job, range=_range(), ranks=str(strip.per_row))
        rank_strip(strip, bool(answer.error), group, entity)
    st.html(markup.slow_ranks(strip))


def _draw_range() -> None:
    st.session_state["jobs_range"] = _range()
    st.segmented_control("Range", list(RANGES), key="jobs_range", label_visibility="collapsed", on_change=_write_range)


def _write_range() -> None:
    """Writes the range into the address; a second click selects the default."""
    st.query_params["range"] = st.session_state["jobs_range"] or "1h"


def _draw_pace(detail: JobDetail) -> None:
    st.html(linked.anchor("pace") + common.section("Step time", "by minute; dashed: usual for this job"))
    if not detail.history:
        st.html(common.notice(f"This job reports no steps: {guide('training.md')} says how to report them."))
        return
    palette = PALETTES["dark" if st.context.theme.type == "dark" else "light"]
    st.altair_chart(markup.pace_chart(detail.history, detail.job.usual_step_time, palette), key="pace")
