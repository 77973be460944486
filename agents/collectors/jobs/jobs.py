"""Which job, rank and pipeline stage holds which GPU of this node: Slurm, Kubernetes, torchrun, MPI (docs/jobs.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.gpu.slots import memory_of_the_service
from agents.collectors.jobs.gpu_assignment import Gpus, find
from agents.collectors.jobs.job_lifecycle import Membership, memory_of_jobs
from agents.collectors.jobs.kubernetes import Kubelet, in_cluster
from agents.collectors.jobs.processes import Processes
from agents.collectors.jobs.ranks import Sources, ranks
from agents.collectors.jobs.slurm_prolog import Folder

GPUS_S = 60.0
"""How often the GPUs' numbers are looked up, and whether a kubelet came; chosen: both change by hand."""
_RIGHT = "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (jobs.conf, docs/agent.md)"


@dataclass
class Jobs(Collector):
    """Events job_start and job_end, and jobs, stages and ranks in the inventory; no signal of its own.

    proc, driver, others: /proc, and where NVIDIA's and AMD's drivers list GPUs. facts: what Slurm's prolog wrote.
    pod_resources: the kubelet's socket; account: folder of the service account; api: the API server, where not the
    cluster's own; kube_node: this node's name in Kubernetes, where it is not that of the agent (or NODE_NAME's).
    gpus, memory: the nvml collector's memory of GPUs, and our own of jobs; by default in the service's state folder.
    """

    name: ClassVar[str] = "jobs"
    remote: ClassVar[bool] = True
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("job_start", "job_end")
    interval: float = 10.0
    proc: Path = Path("/proc")
    facts: Path = Path("/run/fleetpulse/jobs")
    driver: Path = Path("/proc/driver/nvidia/gpus")
    others: Path = Path("/sys/bus/pci/drivers/amdgpu")
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    api: str = ""
    kube_node: str = ""
    gpus: Path | None = field(default_factory=memory_of_the_service)
    memory: Path | None = field(default_factory=memory_of_jobs)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)
    _processes: Processes | None = field(default=None, init=False, repr=False)
    _folder: Folder | None = field(default=None, init=False, repr=False)
    _kubelet: Kubelet | None = field(default=None, init=False, repr=False)
    _members: Membership = field(default_factory=Membership, init=False, repr=False)
    _found: Gpus = field(default_factory=Gpus, init=False, repr=False)
    _said: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        if not (self.proc / "stat").exists():
            raise NoData(f"{self.proc}: no processes; wanted /proc mounted")
        self._node, self._rhythm = node, Rhythm(node, self._now)
        self._rhythm.due(GPUS_S)
        self._processes, self._folder = Processes(self.proc, node), Folder(self.facts)
        kube_node = self.kube_node or os.environ.get("NODE_NAME", "") or node
        self._kubelet = Kubelet(self.pod_resources, self.account, self.api or in_cluster(), kube_node, self.interval)
        if not self._members.ranks:
            self._members = Membership(self.memory)
            self._members.recall()
        self._seldom()

    def read(self) -> tuple[Reading, ...]:
        if self._processes is None or self._folder is None or self._kubelet is None:
            raise NoData("not open")
        if self._rhythm.due(GPUS_S):
            self._seldom()
        processes = self._processes.look()
        blind, refused = self._processes.blind, len(self._processes.refused)
        facts, pods = self._folder.look(), self._kubelet.pods
        sources = Sources(processes.values(), facts, pods, self._found, self._node, blind)
        events = self._members.follow(ranks(sources), self._now())
        lack = f"the environment of {refused} processes may not be read: wanted {_RIGHT}"
        self._say("rights", lack if blind else "")
        self._say("pods", self._kubelet.trouble)
        return (Reading("rank", tuple(self._members.ranks), {}, tuple(events)),)

    def inventory(self) -> Mapping[str, Device]:
        """Jobs, their stages as far as known, and the ranks on this node."""
        found: dict[str, Device] = {}
        for rank in self._members.ranks.values():
            job = f"job:{rank.job}"
            found.setdefault(job, Device((), self._members.job_of(rank.job)))
            if rank.stage:
                found.setdefault(f"stage:{rank.job}.{rank.stage}", Device((job,)))
        for entity, rank in self._members.ranks.items():
            found[entity] = Device(rank.parents(self._node), rank.attributes)
        return found

    def close(self) -> None:
        if self._kubelet is not None:
            self._kubelet.stop()
        self._processes = self._folder = self._kubelet = None

    def _seldom(self) -> None:
        self._found = find(self.gpus, self.driver, self.others)
        if self._kubelet is not None and self._kubelet.present():
            self._kubelet.start()

    def _say(self, subject: str, text: str) -> None:
        """One line for the journal when something begins to be lacking; the number of it may change unsaid."""
        kind = text.translate(_NO_DIGITS)
        if self._said.get(subject, "") != kind:
            self._said[subject] = kind
            sys.stderr.write(f"collector jobs: {text or f'{subject}: all is had again'}\n")


_NO_DIGITS = str.maketrans("", "", "0123456789")
