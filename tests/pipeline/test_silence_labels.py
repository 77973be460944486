"""Labels of incidents for matchers: where its devices are, not those that suffer."""

from __future__ import annotations

from pipeline.incidents.silences import collect_labels
from pipeline.model.records import Incident
from pipeline.model.topology import Topology

PARENTS = {
    **{f"gpu:n{n}.0": (f"node:n{n}",) for n in range(3)},
    **{f"node:n{n}": (f"rack:r{n // 2}",) for n in range(3)},
    **{f"rank:1.{n}": ("job:1", f"gpu:n{n}.0") for n in range(3)},
    "rack:r0": ("cdu:c1",),
    "rack:r1": ("cdu:c1",),
}


def labels(cause: str, *members: str) -> dict[str, tuple[str, ...]]:
    one = Incident("inc-1", cause, 0, 0, "page", "x", "thermal", cause, members)
    return collect_labels(one, Topology(PARENTS), "s")


def test_a_job_that_suffers_takes_no_label_of_the_place_away() -> None:
    found = labels("rack:r0", "gpu:n0.0", "gpu:n1.0", "job:1", "rank:1.2")
    assert (found["rack"], found["cdu"], found["scope"]) == (("r0",), ("c1",), ("rack:r0", "cdu:c1"))


def test_an_incident_of_a_job_alone_has_the_label_of_the_job() -> None:
    assert labels("job:1", "job:1")["job"] == ("1",)
