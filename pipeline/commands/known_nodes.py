"""The nodes that Fleetpulse knows, as the state of a site without a scheduler: for dry runs, tickets and diagnostics.

The jobs are those of the telemetry. Only a scheduler knows which nodes are out of service, and all that runs on each.
So it replaces one only while no verb is on that takes nodes out of service or ends work: those stay refused without a
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.acts.adapters.adapter import Adapter
from pipeline.acts.adapters.noop import Noop
from pipeline.acts.scheduler import SchedulerJob, SchedulerNode, SchedulerState, list_jobs_by_node
from pipeline.config.acts import Acts
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import Unreachable

NEED_SCHEDULER = ("hold", "release", "evict", "reset", "reboot")
"""Verbs that need a scheduler to be on."""
MOST_JOBS = 10_000
"""Running jobs of one answer: the most that the API gives. With more, the jobs of a node may be missing."""


class KnownNodes(Noop):
    """The adapter `noop` with the nodes of the pipeline. config: with the executor's token."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.acts)
        self._config = config

    def read_state(self, now: int) -> SchedulerState:
        """Returns all nodes, none out of service, and the jobs of the telemetry. Raises Unreachable without them."""
        names = [_bare(node["entity"]) for node in self._read("/api/v1/fleet")["nodes"]]
        if not names:  # after the first start: a plan would refuse every node as unknown
            raise Unreachable("the pipeline knows no node yet; expected telemetry of at least one")
        jobs = parse_jobs(self._read(f"/api/v1/jobs?running=true&all_nodes=true&limit={MOST_JOBS}"))
        if len(jobs) >= MOST_JOBS:
            raise Unreachable(f"the pipeline knows {MOST_JOBS:,} running jobs or more: expected fewer, or a scheduler")
        on = list_jobs_by_node(jobs)
        nodes = {name: SchedulerNode(name, False, "no scheduler", jobs=on.get(name, ())) for name in names}
        return SchedulerState(now, nodes, jobs)

    def _read(self, path: str) -> Any:
        status, answer = client.get(self._config, path)
        if status != 200:
            raise Unreachable(f"{client.base_url(self._config)}{path}: HTTP {status}; expected nodes and jobs")
        return answer


def parse_jobs(answer: Mapping[str, Any]) -> dict[str, SchedulerJob]:
    """Returns the running jobs of `GET /api/v1/jobs`, by the name that the telemetry gives them."""
    found = {}
    for row in answer["jobs"]:
        id_, nodes = _bare(row["job"]), tuple(map(_bare, row["nodes"]))
        found[id_] = SchedulerJob(id_, nodes, int(row["gpus"] or 0), str(row["account"] or ""))
    return found


def _bare(entity: object) -> str:
    return str(entity).partition(":")[2]


def find_scheduler(chosen: Adapter, config: Config) -> Adapter:
    """Returns the adapter that knows the nodes: the site's scheduler, or without one the nodes of the pipeline."""
    if chosen.name != "noop" or needs_scheduler(config.acts):
        return chosen
    return KnownNodes(config)


def needs_scheduler(acts: Acts) -> bool:
    """Returns whether a verb is on that must not be judged without a scheduler."""
    return any(acts.mode_of(verb) == "on" for verb in NEED_SCHEDULER)
