"""The nodes that Fleetpulse knows, as the state of a site without a scheduler: for dry runs, tickets and diagnostics.

Who is out of service, and what runs where, only a scheduler can say. So it stands in for one only while no verb is on
that takes nodes out of service or ends work: those stay refused without a scheduler.
"""

from __future__ import annotations

from pipeline.acts.adapters.adapter import Adapter
from pipeline.acts.adapters.noop import Noop
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import Unreachable

NEED_SCHEDULER = ("hold", "release", "evict", "reset", "reboot")
"""Verbs that need a scheduler to be on."""


class KnownNodes(Noop):
    """The adapter `noop` with the nodes of the pipeline. config: with the executor's token."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.acts)
        self._config = config

    def read_state(self, now: int) -> SchedulerState:
        """Returns all nodes, none out of service, without jobs. Raises Unreachable without an answer."""
        status, answer = client.get(self._config, "/api/v1/fleet")
        if status != 200:
            raise Unreachable(f"{client.base_url(self._config)}/api/v1/fleet: HTTP {status}; expected the nodes")
        names = [str(node["entity"]).partition(":")[2] for node in answer["nodes"]]
        return SchedulerState(now, {name: SchedulerNode(name, False, "no scheduler") for name in names})


def find_scheduler(chosen: Adapter, config: Config) -> Adapter:
    """Returns the adapter that knows the nodes: the site's scheduler, or without one the nodes of the pipeline."""
    if chosen.name != "noop" or needs_scheduler(config.acts):
        return chosen
    return KnownNodes(config)


def needs_scheduler(acts: Acts) -> bool:
    """Returns whether a verb is on that must not be judged without a scheduler."""
    return any(acts.mode_of(verb) == "on" for verb in NEED_SCHEDULER)
