"""Each finding that a cause explains has the path by which the fault reaches it."""

from __future__ import annotations

import pytest

from pipeline.incidents.paths import MOST_EXPLAINED, describe_step, explain_incident, find_path
from pipeline.model.topology import Topology

TOPOLOGY = Topology(
    {
        "rack:r1": ("cdu:c1", "pdu:p1"),
        "node:n1": ("rack:r1",),
        "node:n2": ("rack:r1",),
        "gpu:n1.0": ("node:n1",),
        "gpu:n2.0": ("node:n2",),
        "port:n1.0": ("node:n1", "leaf:l1", "rail:0"),
        "rank:81.0": ("stage:81.0", "job:81", "gpu:n1.0"),
        "rank:81.1": ("stage:81.0", "job:81", "gpu:n2.0"),
    }
)


@pytest.mark.parametrize(
    ("cause", "entity", "path"),
    [
        ("cdu:c1", "rank:81.0", "cdu:c1 rack:r1 node:n1 gpu:n1.0 rank:81.0"),
        ("cdu:c1", "cdu:c1", "cdu:c1"),
        ("leaf:l1", "port:n1.0", "leaf:l1 port:n1.0"),
        ("leaf:l1", "gpu:n1.0", "leaf:l1 port:n1.0 node:n1 gpu:n1.0"),
        ("leaf:l1", "rank:81.0", "leaf:l1 port:n1.0 node:n1 gpu:n1.0 rank:81.0"),
        ("leaf:l1", "job:81", "leaf:l1 port:n1.0 node:n1 gpu:n1.0 rank:81.0 job:81"),
        ("job:81", "gpu:n2.0", "job:81 rank:81.1 gpu:n2.0"),
        ("job:81", "node:n2", "job:81 rank:81.1 gpu:n2.0 node:n2"),
        ("rack:r1", "cdu:c1", "rack:r1 cdu:c1"),
        ("cdu:c1", "node:x", "cdu:c1 node:x"),
    ],
)
def test_a_path_leads_from_the_cause_to_the_finding(cause: str, entity: str, path: str) -> None:
    assert " ".join(find_path(cause, entity, TOPOLOGY)) == path


def test_a_step_names_what_lies_between_the_fault_and_the_symptom() -> None:
    assert describe_step("cdu:c1", "rank:81.0", "straggler") == "coolant supply → heat → lower clock → slow work"
    assert describe_step("leaf:l1", "port:n1.0", "link") == "network switch → link errors or link down"
    assert describe_step("gpu:n1.0", "gpu:n1.0", "sdc") == "wrong results"
    assert describe_step("node:n1", "gpu:n1.0", "another_detector") == "fault of the node → another"
    assert describe_step("gpu:n1.0", "rank:81.0", "straggler") == "fault of the GPU → slow work"


def test_an_incident_lists_its_earliest_findings_and_counts_all() -> None:
    lines = [
        {"entity": f"gpu:n1.{i}", "detector": "thermal", "level": "page", "onset": f"{i:04d}", "summary": "hot"}
        for i in range(300, -1, -1)
    ]
    stored = {"evidence": "14 of 16 nodes", "alternatives": [{"cause": None, "probability": 0.1}]}
    found = {"cause": "cdu:c1", "confidence": 0.9, "explanation": stored, "findings": lines}
    made = explain_incident(found, TOPOLOGY)
    assert (made["root"], made["kind"], made["probability"], made["evidence"]) == (
        "cdu:c1",
        "cdu",
        0.9,
        "14 of 16 nodes",
    )
    assert (made["explained_count"], len(made["explained"])) == (301, MOST_EXPLAINED)
    assert made["explained"][0]["path"] == ["cdu:c1", "rack:r1", "node:n1", "gpu:n1.0"]
    assert made["faults_per_day"] is None
