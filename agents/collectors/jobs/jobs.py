"""The collector `jobs`: which job, rank and pipeline stage holds which GPU of this node (docs/jobs.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.gpu.slots import default_state_file
from agents.collectors.jobs.gpu_assignment import GpuNumbers, load_gpu_numbers
from agents.collectors.jobs.job_lifecycle import JobTracker, job_state_file
from agents.collectors.jobs.kubernetes import PodPoller, cluster_api_url
from agents.collectors.jobs.processes import ProcessScanner
from agents.collectors.jobs.ranks import JobSources, find_ranks
from agents.collectors.jobs.slurm_prolog import PrologFiles
from pipeline.runtime.guides import guide
from pipeline.runtime.log_line import write_log_line

REFRESH_S = 60.0
"""Seconds between two reads of the GPUs' numbers, and checks for a kubelet. Chosen: both change only by hand."""
_REQUIRED_RIGHTS = f"CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (jobs.conf, {guide('agent.md')})"


@dataclass
class Jobs(Collector):
    """Reports events job_start and job_end, and jobs, stages and ranks in the inventory; has no signals.

    proc, driver, others: /proc, and the folders in which NVIDIA's and AMD's drivers list GPUs. facts: folder of the
    files that Slurm's prolog wrote. pod_resources: the kubelet's socket. account: folder of the service account. api:
    URL of the API server, if not the cluster's own. kube_node: this node's name in Kubernetes, if it is not the agent's
    (or NODE_NAME). gpus, memory: state files of the nvml collector's GPUs and of our jobs, by default in the service's
    folder.
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
    gpus: Path | None = field(default_factory=default_state_file)
    memory: Path | None = field(default_factory=job_state_file)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _rhythm: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)
    _processes: ProcessScanner | None = field(default=None, init=False, repr=False)
    _prolog: PrologFiles | None = field(default=None, init=False, repr=False)
    _pods: PodPoller | None = field(default=None, init=False, repr=False)
    _tracker: JobTracker = field(default_factory=JobTracker, init=False, repr=False)
    _gpu_numbers: GpuNumbers = field(default_factory=GpuNumbers, init=False, repr=False)
    _logged: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        if not (self.proc / "stat").exists():
            raise NoData(f"{self.proc}: no process information; mount /proc there")
        self._node, self._rhythm = node, SamplingSchedule(node, self._now)
        self._rhythm.due(REFRESH_S)
        self._processes, self._prolog = ProcessScanner(self.proc, node), PrologFiles(self.facts)
        kube_node = self.kube_node or os.environ.get("NODE_NAME", "") or node
        self._pods = PodPoller(
            self.pod_resources, self.account, self.api or cluster_api_url(), kube_node, self.interval
        )
        if not self._tracker.ranks:
            self._tracker = JobTracker(self.memory)
            self._tracker.restore()
        self._refresh()

    def read(self) -> tuple[Reading, ...]:
        """Returns the ranks on this node, with the events of jobs that started or ended."""
        if self._processes is None or self._prolog is None or self._pods is None:
            raise NoData("not open")
        if self._rhythm.due(REFRESH_S):
            self._refresh()
        processes = self._processes.scan()
        mostly_refused, refused = self._processes.mostly_refused, len(self._processes.refused)
        failed = dict(self._processes.failed)
        facts, pods = self._prolog.read_jobs(), self._pods.pods
        sources = JobSources(processes.values(), facts, pods, self._gpu_numbers, self._node, mostly_refused)
        events = self._tracker.update(find_ranks(sources), self._now())
        problem = f"permission denied for the environment of {refused} processes: requires {_REQUIRED_RIGHTS}"
        self._log_change("rights", problem if mostly_refused else "")
        self._log_change("pods", self._pods.problem)
        self._log_change("processes", _describe_failed(failed))
        return (Reading("rank", tuple(self._tracker.ranks), {}, tuple(events)),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns jobs, their stages where known, and the ranks on this node."""
        found: dict[str, Device] = {}
        for rank in self._tracker.ranks.values():
            job = f"job:{rank.job}"
            found.setdefault(job, Device((), self._tracker.describe_job(rank.job)))
            if rank.stage:
                found.setdefault(f"stage:{rank.job}.{rank.stage}", Device((job,)))
        for entity, rank in self._tracker.ranks.items():
            found[entity] = Device(rank.parents(self._node), rank.attributes)
        return found

    def close(self) -> None:
        """See `Collector.close`."""
        if self._pods is not None:
            self._pods.stop_polling()
        self._processes = self._prolog = self._pods = None

    def _refresh(self) -> None:
        """Reads the GPUs' numbers again, and starts the pod poller once there is a kubelet."""
        self._gpu_numbers = load_gpu_numbers(self.gpus, self.driver, self.others)
        if self._pods is not None and self._pods.is_available():
            self._pods.start_polling()

    def _log_change(self, subject: str, text: str) -> None:
        """Logs one line when a problem begins, changes its kind or ends; a change of numbers alone is not logged."""
        kind = text.translate(_NO_DIGITS)
        if self._logged.get(subject, "") != kind:
            self._logged[subject] = kind
            write_log_line(f"collector jobs: {text or f'{subject}: resolved'}")


def _describe_failed(failed: Mapping[int, str]) -> str:
    """Returns what to log of the processes that could not be interpreted; empty if there are none."""
    if not failed:
        return ""
    pid, error = next(iter(failed.items()))
    printable = "".join(c if c.isprintable() else "?" for c in error)[:_MAX_ERROR_CHARS]
    return f"{len(failed)} processes are left out, expected no error: the first is pid {pid}: {printable}"


_MAX_ERROR_CHARS = 200  # of an error's text, which may hold a part of an environment; chosen, about two lines
_NO_DIGITS = str.maketrans("", "", "0123456789")
