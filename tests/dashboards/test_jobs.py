"""The page Jobs with a real API, without a browser."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import snapshot
from dashboards.jobs.answers import parse_jobs, parse_strip
from dashboards.jobs.markup import job_tiles
from dashboards.jobs.page import job_of
from dashboards.rank_strip.component import strip_data
from pipeline.model.job_effect import name_doubt
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW
from tests.dashboards.jobs_tables import ago, answers, harm, job, job_detail, jobs_table, strip_table
from tests.dashboards.test_dashboard_pages import page, shown

DOUBT = name_doubt("step time", NOW - 3000 * SECOND)


def script() -> None:
    from dashboards.jobs.page import page

    page()


@pytest.fixture
def site(api: Any) -> Any:
    api.answers = answers()
    return api


def test_hanging_and_slow_jobs_come_first_with_pace_and_loss(site: Any) -> None:
    text = shown(page(script))
    assert "4 running jobs, 1 hanging, 1 slow" in text
    assert text.index("job 82") < text.index(">job 81") < text.index(">job 80") < text.index(">job 79")
    for part in ("2.78 s, usually 2.1 s", "+31 %", "512 GPUs on 64 nodes", "210.4 GPU-h", "reports no steps"):
        assert part in text
    assert 'href="jobs?entity=job%3A81"' in text
    assert 'href="incident?id=A1"' in text


def test_names_of_jobs_are_never_markup(site: Any) -> None:
    text = shown(page(script))
    assert "<b>llama</b>" not in text
    assert "&lt;b&gt;llama&lt;/b&gt;" in text


@pytest.mark.parametrize(("text", "number"), [("81", 1), ("ADA", 5), ("n003", 5), ("llama", 1), ("<b>", 1), ("xyz", 0)])
def test_the_filter_finds_id_name_user_and_node(site: Any, text: str, number: int) -> None:
    from dashboards.jobs import markup
    from dashboards.jobs.answers import parse_jobs

    assert len(markup.find_jobs(parse_jobs(jobs_table()).jobs, text)) == number


def test_no_job_says_where_jobs_come_from(api: Any) -> None:
    api.answers = {"jobs": jobs_table([])}
    text = shown(page(script))
    assert "No job is running" in text
    assert "docs/jobs.md" in text


@pytest.mark.parametrize(("report", "said"), [(20, ""), (300, "no report of its steps for 5 min"), (None, "")])
def test_the_age_of_the_last_step_says_if_reports_of_steps_are_late(report: int | None, said: str) -> None:
    row = job("81", last_step=ago(302), last_report=None if report is None else ago(report))
    text = job_tiles(parse_jobs(jobs_table([row])).jobs[0], [], NOW)
    assert "since the last step" in text
    assert ("no report of its steps" in text) == bool(said)
    assert said in text


def test_hundreds_of_jobs_are_listed_and_the_rest_is_counted(api: Any) -> None:
    api.answers = {"jobs": jobs_table([job(str(i)) for i in range(700)])}
    assert "500 more jobs are not listed" in shown(page(script))


def test_one_job_shows_slowdown_cause_late_ranks_nodes_and_events(site: Any) -> None:
    text = shown(page(script, entity="job:81"))
    assert "Job 81 (pretrain-70b): 31 % slower than usual, rank 17 is late" in text
    for part in (
        "cause: GPU 7 of sim-n010: thermal throttle",
        "usually 2.1 s",
        "121.2 per hour now",
        "64 ranks against the median of their stage",
        "GPU 1 of n003",
        "1 critical and 1 no data",
        "run ended after",
        "checkpoint: step 7",
    ):
        assert part in text
    assert "within=job%3A81" in text


def test_the_cause_of_the_slowdown_is_the_incident_that_counts_the_loss(site: Any) -> None:
    rank = harm(id="B1", summary="rank 214 slow", slowdown=2.3, basis="step time 24 s; counted in B2", lost_gpu_hours=9)
    flow = harm(id="B2", summary="CDU c1: flow 11 L/min", slowdown=2.2)
    site.answers["jobs/job:81"] = job_detail(harmed_by=[rank, flow])
    text = shown(page(script, entity="job:81"))
    assert "cause: CDU c1: flow 11 L/min" in text
    assert "cause: Rank 214 slow" not in text


def test_a_rank_or_stage_leads_to_its_job() -> None:
    assert [job_of(e) for e in ("job:81", "rank:81.17", "stage:a.b.3", "gpu:n1.0", "")] == [
        "job:81",
        "job:81",
        "job:a.b",
        "",
        "",
    ]


def test_some_ranks_and_the_range_are_in_the_address(site: Any) -> None:
    site.answers["rank-strip"] = {**strip_table(32), "first_rank": 64, "ranks": 16_384}
    text = shown(page(script, entity="job:81", range="6h", first="64", ranks="32"))
    query = next(query for path, query in site.asked if path == "rank-strip")
    assert (query["hours"], query["first"], query["ranks"]) == (["6.0"], ["64"], ["32"])
    assert "Ranks 64 to 95 of 16,384" in text
    page(script, entity="job:81", first="<b>", ranks="0")
    assert "first" not in [query for path, query in site.asked if path == "rank-strip"][-1]


def test_an_ended_job_has_no_strip(site: Any) -> None:
    site.answers["jobs/job:81"] = job_detail(state="ended", ended="2026-01-01T11:00:00.000000Z")
    text = shown(page(script, entity="job:81"))
    assert "Job 81 (pretrain-70b) has ended" in text
    assert "Ranks over time" not in text


def test_ranks_without_compute_time_are_not_called_in_time(site: Any) -> None:
    site.answers["rank-strip"] = strip_table(measured=None, slow=[], late_ranks=0)
    text = shown(page(script, entity="job:81"))
    assert "report no compute time" in text
    assert "No rank is late" not in text


@pytest.mark.slow
def test_jobs_that_are_not_known_and_an_absent_api_are_said(site: Any) -> None:
    assert "job 9 is not known" in shown(page(script, entity="job:9"))
    assert "Expected a job, rank or stage" in shown(page(script, entity="node:n1"))
    site.broken["jobs"] = (503, b"{}")
    snapshot._fetch_cached.clear()
    text = shown(page(script))
    assert "Jobs unknown" in text or "Last known" in text


def test_a_strip_of_16384_ranks_is_small() -> None:
    strip = parse_strip(strip_table(16_384))
    data = strip_data(strip, False, "jobs?entity=job%3A81", "rank:81.32")
    assert (strip.rows, strip.per_row, data["highlight"]) == (512, 32, 1)
    assert data["lateRows"] == [0]  # of rank 17
    assert len(str(data["levels"])) < 130_000  # base64 of 92 kB
    assert len(data["times"]) <= 9  # type: ignore[arg-type]


def test_the_start_of_a_job_on_many_nodes_is_one_row(site: Any) -> None:
    items = [{"time": iso(NOW), "kind": "event", "entity": "job:81", "text": "job start: 8 ranks"} for _ in range(34)]
    site.answers["timeline"] = {"items": items}
    text = shown(page(script, entity="job:81"))
    assert text.count("job start: 8 ranks") == 1
    assert "job start: 8 ranks (34 times)" in text


@pytest.mark.parametrize(
    ("share", "said"), [(None, "not known"), (0.314, "+31 %"), (-0.001, "0 %"), (0.0, "0 %"), (-0.02, "-2 %")]
)
def test_a_slowdown_is_never_minus_zero(share: float | None, said: str) -> None:
    from dashboards.jobs.markup import percent

    assert percent(share) == said


def test_a_job_whose_nodes_nothing_names_runs_not_on_zero_nodes(site: Any) -> None:
    site.answers["jobs"] = jobs_table([job("9", nodes=[], node_count=0, gpus=4)])
    text = shown(page(script))
    assert "4 GPUs, nodes not known" in text
    assert "0 nodes" not in text


@pytest.mark.parametrize(
    ("incident", "taints"),
    [
        ({"detector": "sdc", "onset": 3000}, True),  # the checkpoint is 1,800 s old
        ({"detector": "sdc_replica", "onset": 3000, "resolved": 900, "basis": DOUBT}, True),
        ({"detector": "sdc_replica", "onset": 3000, "resolved": 900}, False),  # its doubt was taken back
        ({"detector": "sdc", "onset": 900}, False),
        ({"detector": "sdc", "onset": 3000, "resolved": 2000, "basis": DOUBT}, True),  # its results stay in doubt
        ({"detector": "sdc", "onset": 3000, "resolved": 2000, "basis": DOUBT, "started": 1900}, False),  # a new run
        ({"detector": "straggler", "onset": 3000}, False),
        ({"detector": "xid", "onset": 900, "basis": DOUBT}, True),  # wrong results are evidence of another incident
        ({"detector": "sdc", "onset": 900, "basis": DOUBT, "resolved": 600}, True),
        ({"detector": "sdc", "onset": 900, "basis": name_doubt("", NOW - 1500 * SECOND)}, False),
        ({"detector": "xid", "onset": 6000, "basis": name_doubt("", NOW - 1500 * SECOND)}, False),  # slow before it
    ],
)
def test_a_checkpoint_that_was_written_during_wrong_results_is_not_safe(
    site: Any, incident: dict[str, Any], taints: bool
) -> None:
    times = {name: ago(incident[name]) for name in ("onset", "resolved") if name in incident}
    run = {"started": ago(incident["started"])} if "started" in incident else {}
    named = {name: incident[name] for name in ("detector", "basis") if name in incident}
    site.answers["jobs/job:81"] = job_detail(harmed_by=[harm(**named, **times)], **run)
    text = shown(page(script, entity="job:81"))
    assert ("not safe: results in doubt" in text) is taints
    assert ("work that a restart repeats" in text) is not taints
    said = "by incident <a" in text and "Restart from one that was written before 2026-01-01 11:10:00Z" in text
    assert said is taints


def test_a_checkpoint_is_as_safe_as_the_first_result_in_doubt_not_as_the_onset(site: Any) -> None:
    doubt = "results in doubt since 2026-01-01T06:50:18Z"
    late = harm(detector="sdc", onset=ago(900), basis=doubt)  # the checkpoint is 1,800 s old
    site.answers["jobs/job:81"] = job_detail(harmed_by=[harm(id="A2", detector="sdc", onset=ago(3000)), late])
    text = shown(page(script, entity="job:81"))
    assert "results since 2026-01-01 06:50:18Z may be wrong. Restart from one that was written before" in text
    snapshot._fetch_cached.clear()
    unknown = harm(detector="sdc", onset=ago(900), basis="results in doubt since an unknown time")
    site.answers["jobs/job:81"] = job_detail(harmed_by=[unknown])
    text = shown(page(script, entity="job:81"))
    assert "no checkpoint is known to be safe" in text
    assert "Restart from one" not in text


def test_a_job_without_a_known_checkpoint_has_no_unsafe_one(site: Any) -> None:
    site.answers["jobs/job:81"] = job_detail(checkpoint=None, harmed_by=[harm(detector="sdc")])
    text = shown(page(script, entity="job:81"))
    assert "none known" in text
    assert "not safe" not in text
