"""[acts] and [executor]: which acts are on, their limits, the policies that propose some, and the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config.settings import constraint

Mode = Literal["off", "dry-run", "on"]
Adapter = Literal["noop", "slurm", "slurmrestd", "kubernetes", "webhook", "exec"]
_SHARE = constraint("a share, from 0 to 1", lambda value: 0 <= value <= 1)
_COUNT = constraint("a number from 1 to 1000000000", lambda value: 1 <= value <= 10**9)
_SECONDS = constraint("seconds, 1 to 86400", lambda value: 1 <= value <= 86_400)
_MINUTES = constraint("minutes, 1 to 1440", lambda value: 1 <= value <= 1440)
_HOURS = constraint("hours, 1 to 168", lambda value: 1 <= value <= 168)
_BURN_IN = constraint("days, 0 (none) to 90", lambda value: 0 <= value <= 90)
_CONFIDENCE = constraint("a probability, 0 to 1", lambda value: 0 <= value <= 1)
_SCOPE = constraint(
    "an entity below the site such as rack:r12, or * for everywhere",
    lambda v: v == "*" or (":" in v.strip(":") and not v.startswith("site:")),  # all of a site is everywhere
)
_ARGV = constraint("a list of words: program and arguments", lambda v: all(words and words[0] for words in v.values()))


@dataclass(frozen=True)
class ActLimits:
    """[acts.limits]: limits of the guards (pipeline/acts/guards.py). All are chosen: no fleet has published its own.

    Shares are of all nodes that the scheduler has, or of a job's nodes; one node is always allowed.
    ceiling_share: of the fleet; without an override.   two_people_gpus: size of a job above which two people must
    stand behind a hold.   state_seconds: oldest state of the scheduler that may be acted on.
    """

    rack_nodes: int = field(default=2, metadata=_COUNT)
    domain_nodes: int = field(default=1, metadata=_COUNT)
    job_share: float = field(default=0.01, metadata=_SHARE)
    fleet_share: float = field(default=0.05, metadata=_SHARE)
    ceiling_share: float = field(default=0.10, metadata=_SHARE)
    acts_per_10_minutes: int = field(default=10, metadata=_COUNT)
    state_seconds: float = field(default=300.0, metadata=_SECONDS)
    two_people_gpus: int = field(default=64, metadata=_COUNT)


@dataclass(frozen=True)
class ActPolicy:
    """[[acts.policies]]: proposes an act for each new incident that matches; with `approve` it also approves it.

    detector: name, or *.   scope: an entity and all below it.   per_hour: acts that it may propose in an hour.
    approve: only with a scope other than *: without one it proposes, and people approve.   burn_in_confidence: enough
    for nodes in their burn-in, if it is less than min_confidence.
    """

    name: str
    verb: Literal["hold", "diagnose", "ticket"] = "hold"
    detector: str = "*"
    scope: str = field(default="*", metadata=_SCOPE)
    min_confidence: float = field(default=0.9, metadata=_CONFIDENCE)
    burn_in_confidence: float = field(default=0.5, metadata=_CONFIDENCE)
    approve: bool = False
    per_hour: int = field(default=1, metadata=_COUNT)


@dataclass(frozen=True)
class SlurmAccess:
    """[acts.slurm]: how the executor reaches Slurm. commands: folder of scontrol and squeue, else those of PATH.

    url, user, token_file: of slurmrestd, for the adapter of that name.
    """

    commands: Path | None = None
    url: str = ""
    user: str = "root"
    token_file: Path | None = None


@dataclass(frozen=True)
class KubernetesAccess:
    """[acts.kubernetes]: how the executor reaches the API server. kubeconfig: None: the pod's own service account.

    gpu_resource: nodes without it are not counted.   evict_minutes: how long an eviction waits for disruption budgets.
    dedicated_taints: keys of taints that reserve nodes for GPU work: such a node is in service. Source of the default:
    the taint that GKE sets on nodes with GPUs.
    """

    kubeconfig: Path | None = None
    context: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    evict_minutes: float = field(default=10.0, metadata=_MINUTES)
    dedicated_taints: tuple[str, ...] = ("nvidia.com/gpu",)


@dataclass(frozen=True)
class WebhookAccess:
    """[acts.webhook]: a house tool that does the work. secret_file: whsec_ secret that signs each request."""

    url: str = ""
    secret_file: Path | None = None
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()


@dataclass(frozen=True)
class Acts:
    """[acts]: mode of each verb, who carries it out, and how long things wait (docs/acts.md).

    A fresh install changes nothing: hold and release are dry runs, hard verbs are off.
    adapters: verb -> adapter; those not named use `adapter`.   excluded: patterns of nodes without acts.
    approval_minutes: an approved act that has not begun by then expires.   proposal_hours: the same without approval.
    exec: verb, or diagnose-LEVEL -> argv; {node}, {act} and {reason} are replaced.   break_glass_per_hour: nodes on
    which an administrator alone may do what needs two people.   burn_in_days: after a release, tighter limits hold.
    """

    hold: Mode = "dry-run"
    release: Mode = "dry-run"
    ticket: Mode = "dry-run"
    diagnose: Mode = "off"
    evict: Mode = "off"
    reset: Mode = "off"
    reboot: Mode = "off"
    adapter: Adapter = "noop"
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    approval_minutes: float = field(default=15.0, metadata=_MINUTES)
    proposal_hours: float = field(default=24.0, metadata=_HOURS)
    break_glass_per_hour: int = field(default=1, metadata=_COUNT)
    verify_minutes: float = field(default=5.0, metadata=_MINUTES)
    burn_in_days: float = field(default=7.0, metadata=_BURN_IN)
    limits: ActLimits = field(default_factory=ActLimits)
    policies: tuple[ActPolicy, ...] = ()
    slurm: SlurmAccess = field(default_factory=SlurmAccess)
    kubernetes: KubernetesAccess = field(default_factory=KubernetesAccess)
    webhook: WebhookAccess = field(default_factory=WebhookAccess)
    exec: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=_ARGV)

    def mode_of(self, verb: str) -> Mode:
        """Returns the mode of a verb."""
        mode: Mode = getattr(self, verb)
        return mode

    def adapter_of(self, verb: str) -> Adapter:
        """Returns the adapter that carries out a verb."""
        return self.adapters.get(verb, self.adapter)


@dataclass(frozen=True)
class Executor:
    """[executor]: the process that carries out acts, at the API of [api].

    token_file: its own token (fleetpulse token create executor --executor), by default that of [api].
    poll_seconds: between questions for work.
    """

    name: str = "executor"
    token_file: Path | None = None
    poll_seconds: float = field(default=5.0, metadata=_SECONDS)
