"""Finds the job, rank and pipeline stage of a process from its environment; used by the agent and by training scripts.

A job's name has no dot, so that `rank:JOB.N` and `stage:JOB.S` split at the last one. The first of these that is set
counts:

    job     FLEETPULSE_JOB; Slurm's job id (of a heterogeneous job the leader's; a task of an array has its own id);
            POD_NAMESPACE/JOB_NAME, set in a pod's manifest; torchrun's run id, or without one its rendezvous
            MASTER_ADDR-MASTER_PORT; MPI's namespace
    rank    FLEETPULSE_RANK; RANK; those of Slurm, MPI and PMI
    stage   FLEETPULSE_STAGE; PIPELINE_STAGE, PIPELINE_PARALLEL_RANK or PP_RANK; FLEETPULSE_STAGES stages of
            consecutive ranks, as Megatron-LM orders them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NAME_CHARS = 120
"""Most characters of a job's name. Chosen: with kind and rank it stays below the API's 200."""
RANK_LIMIT = 2**24
"""Ranks are below it. Chosen: a hundred times the largest job known."""
_FORBIDDEN_CHARS = re.compile(r"[^A-Za-z0-9_+/@-]+")
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
_LAUNCHER_RANKS = frozenset({"FLEETPULSE_RANK", "RANK"})
IDENTITY_VARIABLES = frozenset(
    (*_RANKS, *_WORLDS, *_LOCAL_RANKS, *_LOCAL_SIZES, *_NODE_RANKS, *_STAGES, "FLEETPULSE_JOB", "FLEETPULSE_STAGES")
) | {
    *("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_JOB_NAME", "SLURM_JOB_USER", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_PARTITION"),
    *("POD_NAMESPACE", "POD_NAME", "JOB_NAME", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"),
}
"""All variables that are read here; nothing else of an environment is kept."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The identity of a process. claim: confidence of its rank; on one node only a job's highest claims are ranks.

    Claims: 3 a launcher of ranks (torchrun) or the user set it, 2 a step of Slurm or MPI, 1 Slurm's batch script.
    job_named_by_user: FLEETPULSE_JOB is set, and overrides every other source. array: `ARRAY_TASK` of a job array's
    task.
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
    job_named_by_user: bool = False
    array: str = ""

    @property
    def rank_entity(self) -> str | None:
        """The rank's entity; None without a rank."""
        return None if self.rank is None else f"rank:{self.job}.{self.rank}"

    @property
    def stage_entity(self) -> str | None:
        """The stage's entity; None without a stage."""
        return f"stage:{self.job}.{self.stage}" if self.stage else None


def identify_process(environment: Mapping[str, str], node: str = "") -> ProcessIdentity | None:
    """Returns the identity of a process with this environment; None if it belongs to no job.

    node: names a job that runs on this node alone.
    """
    job, scheduler, number = _find_job(environment, node)
    if not job:
        return None
    key, rank = _first_number(environment, _RANKS)
    world = _first_number(environment, _WORLDS)[1]
    return ProcessIdentity(
        job,
        scheduler,
        number,
        rank,
        world,
        _first_number(environment, _LOCAL_RANKS)[1],
        _find_local_size(environment),
        _first_number(environment, _NODE_RANKS)[1],
        _find_stage(environment, rank, world),
        _rate_claim(environment, key),
        _one_line(environment.get("SLURM_JOB_NAME") or environment.get("JOB_NAME", "")),
        _one_line(environment.get("SLURM_JOB_USER", "")),
        bool(clean_name(environment.get("FLEETPULSE_JOB", ""))),
        _array_task_id(environment),
    )


def clean_name(name: str) -> str:
    """Returns a name without the characters that have a meaning in entities."""
    return _FORBIDDEN_CHARS.sub("-", name)[:MAX_NAME_CHARS].strip("-")


def parse_number(text: str | None) -> int | None:
    """Returns a number that can be a rank or a size; None for anything else."""
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return value if (value := int(text)) < RANK_LIMIT else None


def _find_job(environment: Mapping[str, str], node: str) -> tuple[str, str, str]:
    """Returns (job name, scheduler, Slurm job id)."""
    slurm = environment.get("SLURM_JOB_ID", "")
    slurm = slurm if _NUMBER.fullmatch(slurm) else ""
    leader = environment.get("SLURM_HET_JOB_ID", "")
    names = (
        ("slurm", leader if slurm and _NUMBER.fullmatch(leader) else slurm),
        ("kubernetes", _pod_job_name(environment)),
        ("torchrun", _torchrun_job_name(environment, node)),
        ("mpi", environment.get("PMIX_NAMESPACE", "")),
    )
    scheduler, name = next(((source, clean_name(name)) for source, name in names if clean_name(name)), ("", ""))
    if chosen := clean_name(environment.get("FLEETPULSE_JOB", "")):
        return chosen, scheduler or "process", slurm
    return name, scheduler, slurm


def _pod_job_name(environment: Mapping[str, str]) -> str:
    space, name = environment.get("POD_NAMESPACE", ""), environment.get("JOB_NAME", "")
    return f"{space}/{name}" if space and name else ""


def _torchrun_job_name(environment: Mapping[str, str], node: str) -> str:
    """Returns torchrun's run id. By default it is "none": then ranks with the same rendezvous are one job."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return run
    where, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not where or parse_number(environment.get("RANK")) is None:
        return ""
    alone = where in ("localhost", "::1") or where.startswith("127.")
    return f"{node if alone and node else where}-{port}" if port else (node if alone and node else where)


def _find_stage(environment: Mapping[str, str], rank: int | None, world: int | None) -> str:
    stage = next((text for key in _STAGES if (text := clean_name(environment.get(key, "")))), "")
    stages = parse_number(environment.get("FLEETPULSE_STAGES"))
    if stage or not stages or rank is None or not world or rank >= world or stages > world:
        return stage
    return str(rank * stages // world)


def _array_task_id(environment: Mapping[str, str]) -> str:
    job, task = (parse_number(environment.get(key)) for key in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return "" if job is None or task is None else f"{job}_{task}"


def _find_local_size(environment: Mapping[str, str]) -> int | None:
    """Returns the number of the job's ranks on this node; None if Slurm's list (`4(x2),3`) differs by node.

    0 is unknown: this process is one of them, and any user can set the variable.
    """
    for key in _LOCAL_SIZES:
        if found := parse_number(environment.get(key)):
            return found
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    return parse_number(text.partition("(")[0]) or None if "," not in text else None


def _rate_claim(environment: Mapping[str, str], key: str) -> int:
    if not key:
        return 0
    return 3 if key in _LAUNCHER_RANKS else 2 if key != _SLURM_RANK or "SLURM_STEP_ID" in environment else 1


def _first_number(environment: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, int | None]:
    """Returns the first of the variables that holds a number, and that number."""
    found = ((key, parse_number(environment.get(key))) for key in keys)
    return next(((key, value) for key, value in found if value is not None), ("", None))


def _one_line(value: str) -> str:
    """Returns a display name, bounded and on one line."""
    return " ".join(value.split())[:MAX_NAME_CHARS]
