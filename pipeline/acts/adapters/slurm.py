"""Slurm by its commands: scontrol, squeue, sinfo, scancel. Tested with 22.05.

Nodes and jobs are read in one-line text (`scontrol -o show node`, `squeue -o`), while the JSON of its
versions differs. A hold is DRAIN: running work continues. Only nodes whose Reason carries our mark are resumed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import Outcome, check_owner, write_note
from pipeline.acts.scheduler import SchedulerJob, SchedulerNode, SchedulerState, list_jobs_by_node
from pipeline.config.acts import Acts
from pipeline.model.errors import Unreachable

TIMEOUT_S = 30.0
"""Time limit of one command (s). Chosen: three times Slurm's own message timeout."""
OUT = frozenset({"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "MAINT", "POWER_DOWN", "POWERED_DOWN"})
"""States, or parts of one, in which a node gets no new work (slurm.conf, scontrol(1))."""
NOT_REGISTERED = "Invalid node state specified"
"""The answer to RESUME of a drained node that has not registered since slurmctld was started: tried again."""
_GRES_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")
Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs one command of Slurm. Raises Unreachable if it cannot run or does not end in time."""
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{shlex.join(words)}: {error}") from error


class Slurm:
    """Carries out acts with Slurm's commands, as a user who may change nodes (operator or root)."""

    name = "slurm"
    verbs: frozenset[Verb] = frozenset({"hold", "release", "evict", "reboot"})

    def __init__(self, config: Acts, run: Run = run_command) -> None:
        self._folder: Path | None = config.slurm.commands
        self._run = run

    def read_state(self, now: int) -> SchedulerState:
        """See `Adapter.read_state`. One `scontrol show node` and one `squeue`."""
        jobs = parse_jobs(self._read(["squeue", "-h", "-t", "R,CG,S", "-o", "%A|%a|%D|%b|%N"]), self._expand)
        return SchedulerState(now, parse_nodes(self._read(["scontrol", "-o", "show", "node"]), jobs), jobs)

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`."""
        names = [target.partition(":")[2] for target in act.targets]
        return tuple(shlex.join(words) for n in names for words in _commands(act, world.nodes.get(n), n, world.jobs))

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.carry_out`."""
        fresh = self._find(node.name)
        if (decided := check_owner(act, fresh, node)) is not None:
            return decided
        said = []
        for words in _commands(act, fresh, node.name, self._jobs_of(act, fresh)):
            ran = self._run(self._locate(words))
            said.append((ran.stderr or ran.stdout).strip())
            if ran.returncode:
                if is_away(ran.stderr) or (act.verb == "release" and NOT_REGISTERED in ran.stderr):
                    raise Unreachable(f"{shlex.join(words)}: {ran.stderr.strip()}")
                return Outcome(False, f"{shlex.join(words)}: {said[-1] or ran.returncode}")
        return Outcome(True, "; ".join(filter(None, said)))

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.undo`."""
        if self._find(node.name).mark != act.mark:
            return Outcome(False, f"{node.name}: is not held for {act.id}")
        ran = self._run(self._locate(_resume(node.name)))
        return Outcome(ran.returncode == 0, (ran.stderr or ran.stdout).strip())

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """See `Adapter.find_effect`."""
        if act.verb == "hold":
            return node.out and node.mark == act.mark
        if act.verb == "evict":
            return not node.jobs or None
        if act.verb == "release":
            return not node.out or None
        return "REBOOT" not in node.state or None

    def _jobs_of(self, act: Act, node: SchedulerNode) -> Mapping[str, SchedulerJob]:
        return self.read_state(0).jobs if act.verb == "evict" and node.jobs else {}

    def _find(self, name: str) -> SchedulerNode:
        found = parse_nodes(self._read(["scontrol", "-o", "show", "node", name]), {})
        if name not in found:
            raise Unreachable(f"scontrol show node {name}: Slurm does not know it")
        jobs = tuple(self._read(["squeue", "-h", "-w", name, "-o", "%A"]).split())
        node = found[name]
        return SchedulerNode(node.name, node.out, node.state, node.reason, tuple(sorted(set(jobs))))

    def _expand(self, names: str) -> tuple[str, ...]:
        return tuple(self._read(["scontrol", "show", "hostnames", names]).split())

    def _read(self, words: Sequence[str]) -> str:
        ran = self._run(self._locate(words))
        if ran.returncode:
            raise Unreachable(f"{shlex.join(words)}: {ran.stderr.strip() or ran.returncode}")
        return ran.stdout

    def _locate(self, words: Sequence[str]) -> list[str]:
        return [str(self._folder / words[0]) if self._folder else words[0], *words[1:]]


def _commands(act: Act, node: SchedulerNode | None, name: str, jobs: Mapping[str, SchedulerJob]) -> list[list[str]]:
    """Returns the commands for one node: drain, resume, end its jobs, or reboot."""
    if act.verb == "hold":
        return [["scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={write_note(act)}"]]
    if act.verb == "release":
        return [_resume(name)]
    if act.verb == "evict":
        found = [jobs.get(job, SchedulerJob(job, ())) for job in (node.jobs if node else ())]
        return [["scontrol", "requeue", job.id] if job.requeues else ["scancel", job.id] for job in found]
    return [["scontrol", "reboot", "ASAP", "nextstate=DOWN", f"reason={write_note(act)}", name]]


def _resume(name: str) -> list[str]:
    return ["scontrol", "update", f"NodeName={name}", "State=RESUME"]


def is_away(text: str) -> bool:
    """Returns whether an error of a command says that slurmctld did not answer: then its effect is unknown."""
    return any(sign in text for sign in ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes"))


def parse_nodes(text: str, jobs: Mapping[str, SchedulerJob]) -> dict[str, SchedulerNode]:
    """Returns the nodes of `scontrol -o show node`; Reason is the last field before `[user@time]`."""
    on = list_jobs_by_node(jobs)
    found = {}
    for line in text.splitlines():
        named, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if named is None or state is None:
            continue
        name, parts = named[1], re.split(r"[+*~#!%$@^-]", state[1].upper())
        reason = re.search(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?(?=\s{2,}|\s*$)", line)
        said = reason[1].strip() if reason else ""
        found[name] = SchedulerNode(name, not OUT.isdisjoint(parts), state[1], said, on.get(name, ()))
    return found


def parse_jobs(text: str, expand: Callable[[str], Iterable[str]]) -> dict[str, SchedulerJob]:
    """Returns the jobs of `squeue -o "%A|%a|%D|%b|%N"`. GPUs: of the gres per node (%b) times nodes."""
    found: dict[str, SchedulerJob] = {}
    known: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        id_, account, _count, gres, names = line.split("|", 4)
        if not names:
            continue
        if names not in known:
            known[names] = tuple(expand(names))
        nodes = known[names]
        per_node = sum(int(n) for n in _GRES_GPUS.findall(gres))
        found[id_] = SchedulerJob(id_, nodes, per_node * len(nodes), account)
    return found
