"""A node of Kubernetes that others change at the same moment: the act waits, it does not fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from pipeline.acts.act import Act
from pipeline.acts.adapters.adapter import NotYet, Outcome
from pipeline.acts.adapters.kubernetes import ANNOTATION, Kubernetes, parse_node
from pipeline.acts.scheduler import SchedulerNode
from pipeline.config.acts import Acts

ACT = Act("ACT-1", "hold", ("node:n1",), "alice", "x", 0, 1, "on", state="executing")


class Server:
    """An API server whose node changes between each look and each of the first `stale` writes."""

    def __init__(self, stale: int, note: str = "") -> None:
        self.stale, self.bodies = stale, list[dict[str, Any]]()
        self.note = note
        self.api_client = client.ApiClient()

    def read_node(self, name: str, **_: object) -> Any:
        ready = SimpleNamespace(type="Ready", status="True")
        meta = SimpleNamespace(name=name, resource_version="7", annotations={ANNOTATION: self.note})
        resources = {"nvidia.com/gpu": "8"}
        status = SimpleNamespace(conditions=[ready], capacity=resources, allocatable=resources)
        return SimpleNamespace(
            metadata=meta, spec=SimpleNamespace(taints=[], unschedulable=bool(self.note)), status=status
        )

    def patch_node(self, name: str, body: dict[str, Any], **_: object) -> None:
        if self.stale:
            self.stale -= 1
            raise ApiException(status=409, reason="Conflict")
        self.bodies.append(body)


def play(server: Server, undo: bool = False) -> Outcome:
    adapter = Kubernetes(Acts(), client.ApiClient)
    adapter._core = server
    node = replace(parse_node(server.read_node("n1"), ()), jobs=())
    act: Callable[[Act, SchedulerNode], Outcome] = adapter.undo if undo else adapter.carry_out
    return act(ACT, node)


@pytest.mark.parametrize("undo", [False, True])
def test_after_two_stale_looks_the_third_writes(undo: bool) -> None:
    server = Server(2, ACT.mark if undo else "")
    assert play(server, undo).done
    assert [body["metadata"]["resourceVersion"] for body in server.bodies] == ["7"]


@pytest.mark.parametrize("undo", [False, True])
def test_a_node_that_changes_all_the_time_is_tried_in_the_next_round(undo: bool) -> None:
    """It failed the hold for good, and its undoing left a node held, with the reason "stale"."""
    server = Server(4, ACT.mark if undo else "")
    with pytest.raises(NotYet, match="n1: others changed it 3 times in between"):
        play(server, undo)
    assert play(server, undo).done
