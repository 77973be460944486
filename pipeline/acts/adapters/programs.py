"""Programs of the site, `[acts.exec]`: verb -> argv, run without a shell. For diagnostics, resets and reboots.

A program gets the node's name as an argument, never as code: each word of argv is formatted by itself. Exit code 0 is
done (for `diagnose`: passed), anything else is failed; what it prints is kept. It runs beside the executor, which goes
on with other acts: a diagnostic takes up to two hours.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import GIVE_UP_S, Outcome, StillRunning, write_note
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.config.acts import Acts
from pipeline.model.errors import ConfigError

TIMEOUT_S = 4 * 3600.0
"""Time limit of one program (s): `dcgmi diag -r 4` takes one to two hours on a node of 8 GPUs. Chosen."""
SHORT_S = 2.0
"""How long the executor waits for the end of a program that it just started, if no other runs, before it goes on (s).
Chosen: most programs end immediately."""
KEPT = 4000
"""Characters of the output that are kept: its end. Chosen."""


@dataclass(frozen=True)
class Running:
    """A program that was started. output: a file without a name.   started: of the monotonic clock (s)."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float


class Programs:
    """Runs the program of a verb, or of a level of a diagnostic (`diagnose-3`). clock: monotonic, in seconds."""

    name = "exec"
    verbs: frozenset[Verb] = frozenset({"diagnose", "reset", "reboot", "ticket", "evict"})
    repeatable: frozenset[Verb] = frozenset()
    """None: what a program did before an interruption is unknown."""
    saved_after_s = 0.0

    def __init__(self, config: Acts, clock: Callable[[], float] = time.monotonic, wait_s: float = SHORT_S) -> None:
        self._programs, self._clock, self._wait_s = config.exec, clock, wait_s
        self._running: dict[tuple[str, str], Running] = {}
        self._ended: dict[tuple[str, str], Outcome] = {}

    def read_state(self, now: int) -> SchedulerState:
        """Returns no nodes: a site with programs for one verb has a scheduler for `hold`, which knows them."""
        return SchedulerState(now, {})

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`. Raises ConfigError without a program for the verb."""
        del world
        return tuple(shlex.join(self._argv(act, target.partition(":")[2])) for target in act.targets)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """Starts the program of a node, or looks whether it has ended. Raises StillRunning."""
        key, wait_s = (act.id, node.name), 0.0
        if key in self._ended:
            return self._ended[key]
        if key not in self._running:
            wait_s = 0.0 if self._running else self._wait_s  # of many nodes the waits would add up
            words = self._argv(act, node.name)
            try:
                self._running[key] = self._start(words)
            except OSError as error:
                return Outcome(False, f"{shlex.join(words)}: {error}")
        code = self._wait(self._running[key], node.name, wait_s)
        said = _read_end(self._running.pop(key).output)
        facts = {"exit_code": str(code), "level": act.params.get("level", "1")}
        late = f"did not end within {TIMEOUT_S / 3600:g} h, and was killed: "
        text = said or f"exit code {code}"
        self._ended[key] = Outcome(code == 0, f"{late}{text}" if code is None else text, facts)
        return self._ended[key]

    def is_waiting(self, act: Act) -> bool:
        """See `Adapter.is_waiting`: one of its programs was started by this process."""
        return any(id_ == act.id for id_, _ in (*self._running, *self._ended))

    def find_limit(self, act: Act) -> float:
        """See `Adapter.find_limit`: a program over its time is killed first."""
        del act
        return TIMEOUT_S + GIVE_UP_S

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """Returns that a program cannot be undone."""
        del act
        return Outcome(False, f"{node.name}: what a program did is not undone")

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """Returns True: the exit code was the check."""
        del act, node
        return True

    def _start(self, words: list[str]) -> Running:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the program runs
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError:
            output.close()
            raise
        return Running(process, output, self._clock())

    def _wait(self, run: Running, name: str, wait_s: float) -> int | None:
        """Returns the exit code; None if it was killed because its time is over. Raises StillRunning."""
        try:
            return run.process.wait(wait_s)
        except subprocess.TimeoutExpired as error:
            age = self._clock() - run.started
            if age <= TIMEOUT_S:
                raise StillRunning(f"the program of {name} runs for {age:.0f} s") from error
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
            return None

    def _argv(self, act: Act, name: str) -> list[str]:
        level = act.params.get("level", "1")
        words = self._programs.get(f"{act.verb}-{level}") or self._programs.get(act.verb)
        if words is None:
            raise ConfigError(f"[acts.exec] {act.verb}: missing; expected the program and its arguments")
        if "gpu" not in act.params and any("{gpu}" in word for word in words):
            raise ConfigError(f"[acts.exec] {act.verb}: its program needs a GPU; expected params gpu, such as gpu=5")
        self._check_words(act, level, words)
        values = {
            "node": name,
            "act": act.id,
            "reason": write_note(act),
            "level": level,
            "gpu": act.params.get("gpu", ""),
        }
        return [_fill(word, values) for word in words]

    def _check_words(self, act: Act, level: str, words: tuple[str, ...]) -> None:
        """Raises ConfigError for a level or GPU that the program does not get: its result would count for what it did
        not test."""
        fixed = f"{act.verb}-{level}" in self._programs or level == "1"
        for name, value in (("level", "" if fixed else level), ("gpu", act.params.get("gpu", ""))):
            if value and not any(f"{{{name}}}" in word for word in words):
                also = f", or {act.verb}-{value}" if name == "level" else ""
                raise ConfigError(
                    f"[acts.exec] {act.verb}: its program does not get {name} {value}; expected {{{name}}} in it{also}"
                )


def _read_end(output: IO[bytes]) -> str:
    """Returns the end of what a program printed, and closes the file."""
    with output:
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - 4 * KEPT))
        return output.read().decode(errors="replace").strip()[-KEPT:]


def _fill(word: str, values: dict[str, str]) -> str:
    """Replaces {node} and the like; other braces stay as they are."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
