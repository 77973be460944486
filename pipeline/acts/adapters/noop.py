"""The adapter that does nothing: for sites that want plans, approvals and the audit, and act by hand."""

from __future__ import annotations

from pipeline.acts.act import VERBS, Act, Verb, describe
from pipeline.acts.adapters.adapter import Immediate, Outcome
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts


class Noop(Immediate):
    """Knows no scheduler, so every guard about one fails as "unknown node": acts stay plans for people."""

    name = "noop"
    verbs: frozenset[Verb] = frozenset(VERBS)

    def __init__(self, config: Acts) -> None:
        del config

    def read_state(self, now: int) -> SchedulerState:
        """Returns no nodes."""
        return SchedulerState(now, {})

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """Returns what a person would do."""
        del world
        return (f"# by hand: {describe(act)}",)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """Does nothing."""
        return Outcome(False, f"no adapter carries out {act.verb} of {node.name}: set [acts] adapter")

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """Does nothing."""
        return self.carry_out(act, node)

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """Returns False: nothing was done."""
        del act, node
        return False
