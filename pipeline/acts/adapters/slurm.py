"""Slurm by its commands: scontrol, squeue, scancel. Tested with 22.05 and 24.11.

Nodes and jobs are read in text (`scontrol -o show node`, `squeue`), while the JSON of its versions differs. No text of
users, such as a job's name, is in it; accounts, which may be any text, are read apart and only shown. A hold is DRAIN:
running work continues. Only nodes whose Reason carries our mark are resumed.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import Immediate, NotYet, Outcome, check_owner, write_note
from pipeline.acts.scheduler import SchedulerJob, SchedulerNode, SchedulerState, list_jobs_by_node
from pipeline.config.acts import Acts
from pipeline.model.errors import Unreachable
from pipeline.model.names import clean_text

TIMEOUT_S = 30.0
"""Time limit of one command (s). Chosen: three times Slurm's own message timeout."""
OUT = frozenset({"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "MAINT", "POWER_DOWN", "POWERED_DOWN"})
"""States, or parts of one, in which a node gets no new work (slurm.conf, scontrol(1))."""
NO_ANSWER = "NOT_RESPONDING"
"""Beside another state: the slurmd does not answer, and the node gets no job (node_mgr.c). Some commands show `*`."""
NOT_ANSWERING = "Not responding"
OF_SLURM = frozenset({"", NOT_ANSWERING, "Node unexpectedly rebooted"})
"""Reasons that slurmctld itself gives to a node that is DOWN (node_mgr.c, ping_nodes.c)."""
NOT_REGISTERED = "Invalid node state specified"
"""The answer to RESUME of a drained node that has not registered since slurmctld was started: tried again."""
ENDED = ("Invalid job id", "already completing or completed", "Job is pending execution")
"""Answers about a job that has ended, or was requeued at another node of the act: it no longer runs."""
MUST_REGISTER = "has not registered at slurmctld; its slurmd must run before it is resumed"
REBOOT_NOTE = " : reboot"
"""How what Slurm adds to the reason of a node that it reboots begins ("reboot issued", "reboot complete")."""
TIMED_OUT = "reboot timed out"
"""What it adds if the node is not back after ResumeTimeout."""
_REASON = re.compile(r"\bReason=(.*?)(?: \[[^\[\]\s]+@[\w:.-]+\](?=\s|$)|(?=\s{2,}|\s*$))")
_GRES_GPUS = re.compile(r"gpu(?::[^:=,()]+)?[:=](\d+)")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)")
_JOBS = "%A|%b|%N"
"""Fields of `squeue -o`: id, GRES per node, nodes. None of them is cut off."""
_ACCOUNTS = "%A|%a"
_ACCOUNT = re.compile(r"(\d+)\|(.*)")
MAX_ACCOUNT = 64
"""Characters of an account that are shown. Chosen: Slurm takes 1024, and plans of many jobs must fit a request."""
_REQUESTS = ("tres-per-job", "tres-per-task", "tres-per-socket", "NumTasks", "OverSubscribe", "Requeue", "BatchFlag")
"""Fields of `squeue -O` after the id: how a job asked for its GPUs, and whether it starts again by itself."""
_WIDTH = 120
"""Characters of each of them. Chosen: a request names a type and a number."""
_REQUESTED = ("-O", ",".join(f"{name}:.{_WIDTH}" for name in ("JobID", *_REQUESTS)))
SAVED_AFTER_S = 10.0
"""How long slurmctld may lose a change when it dies (s). Source: it writes its state at most 5 s after a change
(SAVE_MAX_WAIT of state_save.c); chosen: twice that, since a busy disk is slower."""
Run = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs one command of Slurm. Raises Unreachable if it cannot run or does not end in time.

    Text of users, such as an account, may be no UTF-8.
    """
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC", "LC_ALL": "C"}
    try:
        return subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S, env=environ, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{shlex.join(words)}: {error}") from error


class Slurm(Immediate):
    """Carries out acts with Slurm's commands, as a user who may change nodes (operator or root)."""

    name = "slurm"
    verbs: frozenset[Verb] = frozenset({"hold", "release", "evict", "reboot"})
    saved_after_s = SAVED_AFTER_S

    def __init__(self, config: Acts, run: Run = run_command) -> None:
        self._folder: Path | None = config.slurm.commands
        self._run = run

    def read_state(self, now: int) -> SchedulerState:
        """See `Adapter.read_state`. One `scontrol show node` and three `squeue`."""
        running = ["squeue", "-h", "-t", "R,CG,S"]
        nodes = self._read(["scontrol", "-o", "-d", "show", "node"])
        listed = self._read([*running, "-o", _JOBS])
        asked = self._read([*running, *_REQUESTED])
        jobs = parse_jobs(listed, parse_requests(asked), parse_used_gpus(nodes), self._expand)
        accounts = parse_accounts(self._read([*running, "-o", _ACCOUNTS]))
        jobs = {id_: replace(job, account=accounts.get(id_, "")) for id_, job in jobs.items()}
        return SchedulerState(now, parse_nodes(nodes, jobs), jobs)

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`."""
        names = [target.partition(":")[2] for target in act.targets]
        lines = (shlex.join(words) for n in names for words in _commands(act, world.nodes.get(n), n, world.jobs))
        return tuple(dict.fromkeys(lines))  # a job on two of the nodes is ended once

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.carry_out`."""
        fresh = self._find(node.name)
        if (decided := check_owner(act, fresh, node)) is not None:
            return decided
        said = []
        for words in _commands(act, fresh, node.name, self._list_jobs(act, fresh)):
            ran = self._run(self._locate(words))
            said.append((ran.stderr or ran.stdout).strip())
            if ran.returncode:
                if act.verb == "release" and NOT_REGISTERED in ran.stderr:
                    raise NotYet(f"{node.name} {MUST_REGISTER}: {ran.stderr.strip()}")
                if act.verb == "evict" and any(sign in ran.stderr for sign in ENDED):
                    continue
                if is_away(ran.stderr):
                    raise Unreachable(f"{shlex.join(words)}: {ran.stderr.strip()}")
                return Outcome(False, f"{shlex.join(words)}: {said[-1] or ran.returncode}")
        return Outcome(True, "; ".join(filter(None, said)))

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.undo`."""
        fresh = self._find(node.name)
        if fresh.mark != act.mark:
            return Outcome(False, f"{node.name}: is not held for {act.id}")
        state, reason = find_undo(fresh, node)
        words = ["scontrol", "update", f"NodeName={node.name}", f"State={state}"]
        ran = self._run(self._locate([*words, *([f"Reason={reason}"] if reason else [])]))
        return Outcome(ran.returncode == 0, (ran.stderr or ran.stdout).strip())

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """See `Adapter.find_effect`."""
        if act.verb == "hold":
            return node.out and node.mark == act.mark
        if act.verb == "evict":
            return not node.jobs or None
        if act.verb == "release":
            return not node.out or None
        return _has_rebooted(node) or None

    def _list_jobs(self, act: Act, node: SchedulerNode) -> Mapping[str, SchedulerJob]:
        """Returns the jobs that an eviction ends on the node.

        Of one answer: a job that two answers disagree about has ended, or was requeued at another node of the act.
        """
        if act.verb != "evict" or not node.jobs:
            return {}
        asked = parse_requests(self._read(["squeue", "-h", "-w", node.name, *_REQUESTED]))
        return {id_: SchedulerJob(id_, (node.name,), requeues=_is_requeued(found)) for id_, found in asked.items()}

    def _find(self, name: str) -> SchedulerNode:
        found = parse_nodes(self._read(["scontrol", "-o", "show", "node", name]), {})
        if name not in found:
            raise Unreachable(f"scontrol show node {name}: Slurm does not know it")
        jobs = tuple(self._read(["squeue", "-h", "-w", name, "-o", "%A"]).split())
        node = found[name]
        return replace(node, jobs=tuple(sorted(set(jobs))))

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
        found = [jobs[job] for job in (node.jobs if node else ()) if job in jobs]
        return [["scontrol", "requeue", job.id] if job.requeues else ["scancel", job.id] for job in found]
    # the reboot's reason replaces the node's: without the mark of the hold the node would no longer be held here
    reason = node.reason.partition(REBOOT_NOTE)[0] if node and node.mark else write_note(act)
    # neither ASAP nor nextstate: both end the DRAIN, and with ReturnToService=2 a node that is DOWN gets work again
    return [["scontrol", "reboot", f"reason={reason}", name]]


def _has_rebooted(node: SchedulerNode) -> bool:
    """Returns whether a reboot is over and the node answers: Slurm ends one that timed out too, and says so."""
    return not node.unusable and "REBOOT" not in node.state and TIMED_OUT not in node.reason


def _resume(name: str) -> list[str]:
    return ["scontrol", "update", f"NodeName={name}", "State=RESUME"]


def find_undo(fresh: SchedulerNode, planned: SchedulerNode) -> tuple[str, str]:
    """Returns the state, and the reason to write, that undo a hold.

    RESUME would also end the DOWN of a node that Slurm marked itself, and give it work without a look. UNDRAIN does
    not, but leaves our mark as the reason, so that Slurm's own is written again. planned: as it was before the hold,
    after an interruption as it was then.
    """
    if "DOWN" not in _split_state(fresh.state):
        return "RESUME", ""
    return "UNDRAIN", planned.reason if planned.absent and planned.reason else NOT_ANSWERING


def _split_state(state: str) -> list[str]:
    """Returns the parts of a state such as `DOWN*+DRAIN`."""
    return re.split(r"[+*~#!%$@^-]", state.upper())


def is_away(text: str) -> bool:
    """Returns whether an error of a command says that slurmctld did not answer: then its effect is unknown."""
    return any(sign in text for sign in ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes"))


def parse_nodes(text: str, jobs: Mapping[str, SchedulerJob]) -> dict[str, SchedulerNode]:
    """Returns the nodes of `scontrol -o show node`. `[user@time]` ends a reason; other fields may follow it."""
    on = list_jobs_by_node(jobs)
    found = {}
    for line in text.splitlines():
        named, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if named is None or state is None:
            continue
        name, parts = named[1], _split_state(state[1])
        reason = _REASON.search(line)
        said = reason[1].strip() if reason else ""
        out, absent = find_out(parts, said)
        jobs_on, unusable = on.get(name, ()), "*" in state[1] or NO_ANSWER in parts
        found[name] = SchedulerNode(name, out, state[1], said, jobs_on, absent=absent, unusable=unusable)
    return found


def find_out(parts: Iterable[str], reason: str) -> tuple[bool, bool]:
    """Returns whether a node with these states gets no new work, and whether only because it does not answer."""
    found = OUT.intersection(parts)
    return bool(found), found == {"DOWN"} and reason in OF_SLURM


def parse_used_gpus(text: str) -> dict[str, int]:
    """Returns how many GPUs of each node are in use, of `scontrol -o -d show node`."""
    found = {}
    for line in text.splitlines():
        named, used = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bGresUsed=(\S+)", line)
        if named is not None:
            found[named[1]] = count_gpus(used[1] if used else "")
    return found


def parse_requests(text: str) -> dict[str, dict[str, str]]:
    """Returns by job the fields `_REQUESTS` of `squeue -O`; "N/A" is left out."""
    found = {}
    for line in text.splitlines():
        id_, *values = line.split()
        named = zip(_REQUESTS, values, strict=False)
        found[id_] = {name: value for name, value in named if value not in ("N/A", "(null)")}
    return found


def _is_requeued(asked: Mapping[str, str]) -> bool:
    """Returns whether a job may be requeued: a batch job that its owner lets start again."""
    return (asked.get("Requeue"), asked.get("BatchFlag")) == ("1", "1")


def parse_accounts(text: str) -> dict[str, str]:
    """Returns by job its account, of `squeue -o _ACCOUNTS`; "" if several lines claim one job.

    Where Slurm does not enforce accounts it is any text of the job's owner, also of several lines and with separators.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        named = _ACCOUNT.fullmatch(line)
        if named is not None:
            known = named[1] in found or named[2] == "(null)"
            found[named[1]] = "" if known else clean_text(named[2], MAX_ACCOUNT)
    return found


def parse_jobs(
    text: str,
    requests: Mapping[str, Mapping[str, str]],
    used: Mapping[str, int],
    expand: Callable[[str], Iterable[str]],
) -> dict[str, SchedulerJob]:
    """Returns the jobs of `squeue -o _JOBS`. requests: see `parse_requests`.   used: GPUs in use, by node."""
    found: dict[str, SchedulerJob] = {}
    known: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        id_, per_node, names = line.split("|", 2)
        if not names:
            continue
        if names not in known:
            known[names] = tuple(expand(names))
        nodes, asked = known[names], requests.get(id_, {})
        gpus = _count_job_gpus(per_node, asked, nodes, used)
        found[id_] = SchedulerJob(id_, nodes, gpus, requeues=_is_requeued(asked))
    return found


def _count_job_gpus(per_node: str, asked: Mapping[str, str], nodes: Sequence[str], used: Mapping[str, int]) -> int:
    """Returns the GPUs of a job as it asked for them: per node, job or task.

    Where that does not say it (per socket, nodes for itself alone), all GPUs in use on its nodes: too many, since
    a large job needs two people.
    """
    tasks = parse_count(asked.get("NumTasks", ""))
    exact = max(
        count_gpus(per_node) * len(nodes),
        count_gpus(asked.get("tres-per-job", "")),
        count_gpus(asked.get("tres-per-task", "")) * tasks,
    )
    return exact or (sum(used.get(name, 0) for name in nodes) if _is_vague(asked) else 0)


def parse_count(text: str) -> int:
    """Returns a number as squeue prints it, also shortened ("2K"); 1 for any other text."""
    found = _COUNT.fullmatch(text)
    return math.ceil(float(found[1]) * 1024 ** " KMG".index(found[2] or " ")) if found else 1


def _is_vague(asked: Mapping[str, str]) -> bool:
    return not asked or "tres-per-socket" in asked or asked.get("OverSubscribe") == "NO"


def count_gpus(text: str) -> int:
    """Returns the GPUs of a GRES or TRES text, such as "gpu:h100:4(IDX:0-3)" or "gres/gpu=2"."""
    return sum(int(number) for number in _GRES_GPUS.findall(text))
