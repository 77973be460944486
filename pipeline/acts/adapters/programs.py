"""Programs of the site, `[acts.exec]`: verb -> argv, run without a shell. For diagnostics, resets and reboots.

A program gets the node's name as an argument, never as code: each word of argv is formatted by itself. Exit code 0 is
done (for `diagnose`: passed), anything else is failed; what it prints is kept.
"""

from __future__ import annotations

import shlex
import subprocess

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import Outcome, write_note
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts
from pipeline.model.errors import ConfigError, Unreachable

TIMEOUT_S = 4 * 3600.0
"""Time limit of one program (s): `dcgmi diag -r 4` takes one to two hours on a node of 8 GPUs. Chosen."""
KEPT = 4000
"""Characters of the output that are kept: its end. Chosen."""


class Programs:
    """Runs the program of a verb, or of a level of a diagnostic (`diagnose-3`)."""

    name = "exec"
    verbs: frozenset[Verb] = frozenset({"diagnose", "reset", "reboot", "ticket", "evict"})

    def __init__(self, config: Acts) -> None:
        self._programs = config.exec

    def read_state(self, now: int) -> SchedulerState:
        """Returns no nodes: a site with programs for one verb has a scheduler for `hold`, which knows them."""
        return SchedulerState(now, {})

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`."""
        del world
        return tuple(shlex.join(self._argv(act, target.partition(":")[2])) for target in act.targets)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """Runs the program. Raises Unreachable if it cannot be started, or does not end in time."""
        words = self._argv(act, node.name)
        try:
            ran = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unreachable(f"{shlex.join(words)}: {error}") from error
        said = (ran.stdout + ran.stderr).strip()[-KEPT:]
        facts = {"exit_code": str(ran.returncode), "level": act.params.get("level", "1")}
        return Outcome(ran.returncode == 0, said or f"exit code {ran.returncode}", facts)

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """Returns that a program cannot be undone."""
        del act
        return Outcome(False, f"{node.name}: what a program did is not undone")

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """Returns True: the exit code was the check."""
        del act, node
        return True

    def _argv(self, act: Act, name: str) -> list[str]:
        level = act.params.get("level", "1")
        words = self._programs.get(f"{act.verb}-{level}") or self._programs.get(act.verb)
        if words is None:
            raise ConfigError(f"[acts.exec] {act.verb}: missing; expected the program and its arguments")
        values = {
            "node": name,
            "act": act.id,
            "reason": write_note(act),
            "level": level,
            "gpu": act.params.get("gpu", ""),
        }
        return [_fill(word, values) for word in words]


def _fill(word: str, values: dict[str, str]) -> str:
    """Replaces {node} and the like; other braces stay as they are."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
