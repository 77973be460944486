"""The impact of incidents and the jobs, over the API, on a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from pipeline.api.impact_models import JobDetail, Jobs
from pipeline.api.models import IncidentDetail, Incidents
from pipeline.api.server import create_app
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config.sections import Config
from pipeline.incidents.jobs import Pulse
from pipeline.model.records import SECOND, iso
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues
from tests.pipeline.api.conftest import InProcess
from tests.pipeline.api.test_api_people import Service
from tests.pipeline.living import MINUTE, LivingSite


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LivingSite]:
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


Get = Callable[[str], httpx.Response]


class Backend(PipelineBackend):
    """The backend of a site whose ingest has read nothing."""

    def read_current(self, device_class: str, columns: Sequence[str] | None = None) -> CurrentValues:
        return CurrentValues({}, {}, np.zeros(0, np.int64), np.zeros(0, np.int32))

    @property
    def devices(self) -> Devices:
        return Devices(self.cursor())

    def list_unready_reasons(self) -> list[str]:
        return []

    def list_evaluation_faults(self) -> list[str]:
        return []

    def read_health(self) -> Any:
        return {"watermark": None, "stalled": False}

    def read_revision(self) -> object:
        return object()


@pytest.fixture
def get(site: LivingSite) -> Get:
    app = create_app(Backend(cast(Any, Service)(site)), Config(), lambda: site.now)
    client = httpx.Client(transport=InProcess(app), base_url="http://127.0.0.1:8600/api/v1")
    return lambda path: client.get(path)


def test_an_incident_says_which_rank_and_job_it_reaches_from_its_first_alert_to_its_end(
    site: LivingSite, get: Get
) -> None:
    id_ = site.report("gpu:n0.0")
    detail = IncidentDetail.model_validate(get(f"/incidents/{id_}").json())
    assert detail.impact is not None
    assert [(j.job, j.state, j.rank_names) for j in detail.impact.jobs] == [("job:1", "unknown", ["rank:1.0"])]
    assert detail.impact.text == "reaches 1 rank of job 1, slowdown not measured"
    (listed,) = Incidents.model_validate(get("/incidents").json()).incidents
    assert listed.impact is not None
    assert (listed.impact.gpus, listed.impact.jobs, listed.impact.lost_gpu_hours) == (1, 1, 0.0)
    site.clear("gpu:n0.0")
    site.wait(15)
    assert site.state(id_) == "resolved"
    after = IncidentDetail.model_validate(get(f"/incidents/{id_}").json()).impact
    assert after is not None
    assert after.jobs == detail.impact.jobs


def test_every_answer_with_the_title_of_an_incident_says_who_is_affected(site: LivingSite, get: Get) -> None:
    backend = Backend(cast(Any, Service)(site))
    client = httpx.Client(transport=InProcess(create_app(backend, Config(), lambda: site.now)))

    def send(path: str, body: dict[str, Any]) -> Any:
        return client.post(f"http://127.0.0.1:8600/api/v1{path}", json=body).json()

    id_ = site.report("gpu:n0.0")
    (title,) = [i["summary"] for i in get("/incidents").json()["incidents"]]
    assert title.endswith("; rank 0 of job 1 on it")
    shift = get("/handover").json()
    titles = [
        *(
            send(f"/incidents/{id_}/{verb}", body)["summary"]
            for verb, body in (("acknowledge", {}), ("assign", {"to": "bob"}))
        ),
        *(
            send(f"/incidents/{id_}/comment", {"comment": "on it"})["summary"],
            get(f"/incidents/{id_}").json()["summary"],
        ),
        *(i["summary"] for i in send("/silences/preview", {"matchers": ["gpu=n0.0"]})["incidents"]),
        *(shift[part][0]["summary"] for part in ("open", "changed")),
        *(row["about"] for row in shift["pending"]),
        *(i["summary"] for i in get("/entity?entity=gpu:n0.0").json()["incidents"]),
        *(i["summary"] for i in get("/jobs/job:1").json()["harmed_by"]),
    ]
    assert titles == [title] * 10
    assert title in client.get("http://127.0.0.1:8600/api/v1/handover", headers={"Accept": "text/plain"}).text


def test_jobs_are_listed_with_their_ranks_pace_and_open_incidents(site: LivingSite, get: Get) -> None:
    backend_now = site.now
    pace = site.engine.impact.jobs
    with site.database.transaction() as connection:
        for i in range(5):
            values = ["job:1", backend_now - (5 - i) * MINUTE, 1.5, 40.0, 2 * SECOND]
            connection.execute("INSERT INTO job_pace VALUES ($1, make_timestamptz($2::BIGINT), $3, $4, $5)", values)
    assert set(pace.jobs) == {"job:1"}
    id_ = site.report("gpu:n0.0")
    (job,) = Jobs.model_validate(get("/jobs?running=true").json()).jobs
    assert (job.job, job.state, job.gpus, job.ranks, job.nodes) == ("job:1", "running", 1, 1, ["node:n0"])
    assert (job.incidents, job.step_time, job.slowdown) == ([id_], None, None)
    assert (job.last_step, job.last_report) == (None, None)
    for name in ("1", "job:1"):
        found = JobDetail.model_validate(get(f"/jobs/{name}").json())
        assert [(r.rank, r.gpu, r.node, r.slowdown) for r in found.rank_list] == [
            ("rank:1.0", "gpu:n0.0", "node:n0", None)
        ]
        assert [m.step_time for m in found.history] == [1.5] * 5
        assert [(i.id, i.state) for i in found.harmed_by] == [(id_, "unknown")]
        assert found.harmed_by[0].detector == get(f"/incidents/{id_}").json()["detector"]
    assert get("/jobs/none").status_code == 404
    pace.pulses = {"job:1": Pulse(backend_now - 4 * SECOND, backend_now - SECOND, True)}
    (job,) = Jobs.model_validate(get("/jobs?running=true").json()).jobs
    for found in (job, JobDetail.model_validate(get("/jobs/1").json())):
        assert (found.state, found.last_step, found.last_report) == (
            "hanging",
            iso(backend_now - 4 * SECOND),
            iso(backend_now - SECOND),
        )
