"""Which job, rank and pipeline stage a process is, from its environment: one pure function for the agent and the hook.

A name of a job holds no dot, so that `rank:JOB.N` and `stage:JOB.S` part at the last one.

    job     FLEETPULSE_JOB; else Slurm's job id (of a heterogeneous job the leader's; a task of an array has an id of
            its own); else POD_NAMESPACE/JOB_NAME, which a pod's manifest sets; else torchrun's run id, or where
            torchrun was given none its meeting point MASTER_ADDR-MASTER_PORT; else MPI's name space
    rank    FLEETPULSE_RANK; else RANK; else Slurm's, MPI's, PMI's
    stage   FLEETPULSE_STAGE; else PIPELINE_STAGE, PIPELINE_PARALLEL_RANK or PP_RANK; else FLEETPULSE_STAGES stages of
            consecutive ranks, as Megatron-LM orders them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_NAME = 120
"""Most characters of a job's name; chosen: with kind and rank it stays below the 200 that the API takes."""
LARGEST = 2**24
"""Ranks are below it; chosen: a hundred times the largest job there was."""
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_+/@-]+")
_NUMBER = re.compile(r"[0-9]{1,8}")
_SLURM_RANK = "SLURM_PROCID"
_RANKS = (
    "FLEETPULSE_RANK",
    "RANK",
    _SLURM_RANK,
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
)
_WORLDS = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
_NODE_RANKS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK")
_STAGES = ("FLEETPULSE_STAGE", "PIPELINE_STAGE", "PIPELINE_PARALLEL_RANK", "PP_RANK")
_LAUNCHED = frozenset({"FLEETPULSE_RANK", "RANK"})
WANTED = frozenset(
    (*_RANKS, *_WORLDS, *_LOCAL_RANKS, *_LOCAL_SIZES, *_NODE_RANKS, *_STAGES, "FLEETPULSE_JOB", "FLEETPULSE_STAGES")
) | {
    *("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_JOB_NAME", "SLURM_JOB_USER", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_PARTITION"),
    *("POD_NAMESPACE", "POD_NAME", "JOB_NAME", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"),
}
"""All variables that are looked at; nothing else of an environment is ever kept."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is. `claim`: how sure its rank is; of one job on one node only the highest claims are ranks.

    3 a launcher of ranks (torchrun) or the user says so, 2 a step of Slurm or MPI, 1 Slurm's batch script.
    named: whether its owner named the job (FLEETPULSE_JOB), so that no other source does.
    array: of a task of a job array `ARRAY_TASK`, as Slurm's users write it.
    """

    job: str
    scheduler: str
    scheduler_id: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    stage: str = ""
    claim: int = 0
    title: str = ""
    user: str = ""
    named: bool = False
    array: str = ""

    @property
    def job_entity(self) -> str:
        return f"job:{self.job}"

    @property
    def rank_entity(self) -> str | None:
        return None if self.rank is None else f"rank:{self.job}.{self.rank}"

    @property
    def stage_entity(self) -> str | None:
        return f"stage:{self.job}.{self.stage}" if self.stage else None


def identify(environment: Mapping[str, str], node: str = "") -> Identity | None:
    """Who a process with this environment is; None if it belongs to no job. `node` names a job that is on it alone."""
    job, scheduler, number = _job(environment, node)
    if not job:
        return None
    key, rank = _first(environment, _RANKS)
    world = _first(environment, _WORLDS)[1]
    return Identity(
        job,
        scheduler,
        number,
        rank,
        world,
        _first(environment, _LOCAL_RANKS)[1],
        _local_size(environment),
        _first(environment, _NODE_RANKS)[1],
        _stage(environment, rank, world),
        _claim(environment, key),
        _text(environment.get("SLURM_JOB_NAME") or environment.get("JOB_NAME", "")),
        _text(environment.get("SLURM_JOB_USER", "")),
        bool(clean(environment.get("FLEETPULSE_JOB", ""))),
        _array(environment),
    )


def clean(name: str) -> str:
    """A name as entities bear it: without what has a meaning there."""
    return _NOT_A_NAME.sub("-", name)[:LONGEST_NAME].strip("-")


def number(text: str | None) -> int | None:
    """A whole number that can be a rank or a size."""
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return value if (value := int(text)) < LARGEST else None


def _job(environment: Mapping[str, str], node: str) -> tuple[str, str, str]:
    """(name, who placed it, its number there)."""
    slurm = environment.get("SLURM_JOB_ID", "")
    slurm = slurm if _NUMBER.fullmatch(slurm) else ""
    leader = environment.get("SLURM_HET_JOB_ID", "")
    names = (
        ("slurm", leader if slurm and _NUMBER.fullmatch(leader) else slurm),
        ("kubernetes", _pod(environment)),
        ("torchrun", _torchrun(environment, node)),
        ("mpi", environment.get("PMIX_NAMESPACE", "")),
    )
    scheduler, name = next(((who, clean(name)) for who, name in names if clean(name)), ("", ""))
    if chosen := clean(environment.get("FLEETPULSE_JOB", "")):
        return chosen, scheduler or "process", slurm
    return name, scheduler, slurm


def _pod(environment: Mapping[str, str]) -> str:
    space, name = environment.get("POD_NAMESPACE", ""), environment.get("JOB_NAME", "")
    return f"{space}/{name}" if space and name else ""


def _torchrun(environment: Mapping[str, str], node: str) -> str:
    """torchrun's run id; "none" is what it has by default, and then ranks that meet at one place are one job."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return run
    where, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not where or number(environment.get("RANK")) is None:
        return ""
    alone = where in ("localhost", "::1") or where.startswith("127.")
    return f"{node if alone and node else where}-{port}" if port else (node if alone and node else where)


def _stage(environment: Mapping[str, str], rank: int | None, world: int | None) -> str:
    said = next((text for key in _STAGES if (text := clean(environment.get(key, "")))), "")
    stages = number(environment.get("FLEETPULSE_STAGES"))
    if said or not stages or rank is None or not world or rank >= world or stages > world:
        return said
    return str(rank * stages // world)


def _array(environment: Mapping[str, str]) -> str:
    job, task = (number(environment.get(key)) for key in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return "" if job is None or task is None else f"{job}_{task}"


def _local_size(environment: Mapping[str, str]) -> int | None:
    """Ranks of the job on this node: Slurm writes `4(x2),3`, which says it only where all nodes have as many."""
    found = _first(environment, _LOCAL_SIZES)[1]
    if found is not None:
        return found
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    return number(text.partition("(")[0]) if "," not in text else None


def _claim(environment: Mapping[str, str], key: str) -> int:
    if not key:
        return 0
    return 3 if key in _LAUNCHED else 2 if key != _SLURM_RANK or "SLURM_STEP_ID" in environment else 1


def _first(environment: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, int | None]:
    """The first of the variables that holds a number, and the number."""
    found = ((key, number(environment.get(key))) for key in keys)
    return next(((key, value) for key, value in found if value is not None), ("", None))


def _text(value: str) -> str:
    """A name for people, bounded and in one line."""
    return " ".join(value.split())[:LONGEST_NAME]
