"""Kubernetes by its official client: cordon with our taint and annotation, evict through the Eviction API, release.

Right needed: nodes get, list, patch; pods get, list; pods/eviction create (deploy/helm has the role). A stale write is
refused by the server (409, resourceVersion) and tried again after a new look, also in the next rounds. Evictions
respect disruption budgets: a pod that its budget protects (429) is asked for again in each round until
[acts.kubernetes] evict_minutes have passed, and other acts go on during that time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from pipeline.acts.act import Act, Verb
from pipeline.acts.adapters.adapter import GIVE_UP_S, Immediate, NotYet, Outcome, StillRunning, check_owner, write_note
from pipeline.acts.scheduler import OWNER, SchedulerJob, SchedulerNode, SchedulerState, list_jobs_by_node
from pipeline.config.acts import Acts
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.model.regular_files import open_regular

ANNOTATION = "fleetpulse.io/held-for"
TAINT = "fleetpulse.io/held"
TIMEOUT_S = 30
"""Time limit of one request (s). Chosen."""
PAGE = 500
"""Objects of one answer: the size that the server's own clients ask for."""
MAX_STALE = 3
"""Tries in one round of a write to an object that others change. Chosen."""
NOT_NOW = (404, 409, 429)
"""Answers to an eviction after which the next one may pass: the pod is gone, was changed, or its budget protects it."""
OVER = ("Succeeded", "Failed")
KEEPING = ("NoSchedule", "NoExecute")
"""Effects of taints that keep new work away."""
NO_ANSWER = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints that the node controller sets and removes by itself while a kubelet does not answer."""


class Kubernetes(Immediate):
    """Carries out acts at an API server. make_api: the client; by default of a kubeconfig or the pod's account.

    clock: monotonic, in seconds.
    """

    name = "kubernetes"
    verbs: frozenset[Verb] = frozenset({"hold", "release", "evict"})

    def __init__(
        self,
        acts: Acts,
        make_api: Callable[[], client.ApiClient] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access, self._clock = acts.kubernetes, clock
        api = make_api() if make_api else self._connect()
        self._core = client.CoreV1Api(api)
        self._until: dict[tuple[str, str], float] = {}
        """When the eviction of a node counts as failed, by act and node."""

    def _connect(self) -> client.ApiClient:
        access = self._access
        if access.kubeconfig is None:
            config.load_incluster_config()
            return client.ApiClient()
        try:
            with open_regular(access.kubeconfig):  # the client opens it by its path, and would wait at a pipe
                pass
        except OSError as error:
            raise ConfigError(
                f"[acts.kubernetes] kubeconfig = {str(access.kubeconfig)!r}: {error.strerror}; expected a readable file"
            ) from error
        return config.new_client_from_config(str(access.kubeconfig), context=access.context or None)

    def read_state(self, now: int) -> SchedulerState:
        """See `Adapter.read_state`. Nodes without GPUs are not counted."""
        with _reachable("list nodes and pods", reads=True):
            nodes = [n for n in self._list(self._core.list_node) if any(self._gpus_of_node(n))]
            pods = list(self._list(self._core.list_pod_for_all_namespaces))
        jobs = self._jobs(pods)
        on = list_jobs_by_node(jobs)
        found = {n.metadata.name: self._parse(n, on.get(n.metadata.name, ())) for n in nodes}
        return SchedulerState(now, found, jobs)

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """See `Adapter.list_commands`: what kubectl would be asked to do."""
        lines: list[str] = []
        for name in (target.partition(":")[2] for target in act.targets):
            if act.verb == "hold":
                lines += (f"kubectl cordon {name}", f"kubectl taint node {name} {TAINT}=true:NoSchedule")
                lines.append(f"kubectl annotate node {name} {ANNOTATION}='{write_note(act)}'")
            elif act.verb == "release":
                lines += (f"kubectl annotate node {name} {ANNOTATION}-", f"kubectl taint node {name} {TAINT}-")
                lines.append(f"kubectl uncordon {name}")
            elif name in world.nodes:
                lines += [f"evict workload {job} from {name} (Eviction API)" for job in world.nodes[name].jobs]
        return tuple(lines)

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.carry_out`."""
        if act.verb == "evict":
            return self._evict(act, node)
        note = write_note(act) if act.verb == "hold" else None
        return self._change(node.name, note, lambda seen: check_owner(act, seen, node))

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """See `Adapter.undo`."""
        other = Outcome(False, f"{node.name}: is not held for {act.id}")
        return self._change(node.name, None, lambda seen: None if seen.mark == act.mark else other)

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """See `Adapter.find_effect`."""
        if act.verb == "hold":
            return node.out and node.mark == act.mark
        return not node.out or None if act.verb == "release" else not node.jobs or None

    # --- one node -----------------------------------------------------------------------------------

    def _change(self, name: str, note: str | None, decide: Callable[[SchedulerNode], Outcome | None]) -> Outcome:
        """Holds (note) or releases (None) a node, unless `decide` says otherwise of it as it is now.

        Raises NotYet if others change it at each try, as kubelet and controllers do while an API server comes back.
        """
        for _ in range(MAX_STALE):
            with _reachable(f"read node {name}", reads=True):
                fresh = self._core.read_node(name, _request_timeout=TIMEOUT_S)
            if (decided := decide(self._parse(fresh))) is not None:
                return decided
            said = self._patch(fresh, note)
            if said != "stale":
                return Outcome(not said, said or "done")
        raise NotYet(f"{name}: others changed it {MAX_STALE} times in between")

    def _patch(self, fresh: Any, note: str | None) -> str:
        """Holds (note) or releases (None) a node as it was read. Returns the refusal; "stale" if it changed since."""
        taints = [t for t in (fresh.spec.taints or ()) if t.key != TAINT]
        kept = [self._core.api_client.sanitize_for_serialization(taint) for taint in taints]
        body = {
            "metadata": {"resourceVersion": fresh.metadata.resource_version, "annotations": {ANNOTATION: note}},
            "spec": {
                "unschedulable": True if note else None,
                "taints": [*kept, {"key": TAINT, "value": "true", "effect": "NoSchedule"}] if note else kept,
            },
        }
        try:
            with _reachable(f"change node {fresh.metadata.name}"):
                self._core.patch_node(fresh.metadata.name, body, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            return "stale" if error.status == 409 else _explain(error)
        return ""

    def _evict(self, act: Act, node: SchedulerNode) -> Outcome:
        """Evicts the pods of a held node, except those of DaemonSets, which come back anyway, and static ones.

        Raises StillRunning while pods end or a budget protects them: the executor must not wait here.
        """
        with _reachable(f"read node {node.name}", reads=True):
            seen = self._parse(self._core.read_node(node.name, _request_timeout=TIMEOUT_S))
        key = act.id, node.name
        if (decided := check_owner(act, seen, node)) is not None:
            self._until.pop(key, None)
            return decided
        end = self._until.setdefault(key, self._clock() + self._access.evict_minutes * 60)
        with _reachable(f"list pods of {node.name}", reads=True):
            listed = self._list(self._core.list_pod_for_all_namespaces, field_selector=f"spec.nodeName={node.name}")
            left = [pod for pod in listed if may_evict(pod)]
        if not left:
            self._until.pop(key)
            return Outcome(True, "all pods are evicted")
        asked = {f"{p.metadata.namespace}/{p.metadata.name}": self._evict_pod(p) for p in left if not _is_ending(p)}
        said = "; ".join(f"{name}: {why}" for name, (why, _) in asked.items() if why)
        if self._clock() >= end or any(final for _, final in asked.values()):
            self._until.pop(key)
            return Outcome(False, said or "pods do not end")
        raise StillRunning(f"pods of {node.name}: {said or f'{len(left)} are ending'}")

    def is_waiting(self, act: Act) -> bool:
        """See `Adapter.is_waiting`: pods of one of its nodes were asked to end, and are still there."""
        return any(id_ == act.id for id_, _ in self._until)

    def find_limit(self, act: Act) -> float:
        """See `Adapter.find_limit`: after an interruption the time for disruption budgets begins again."""
        del act
        return GIVE_UP_S + self._access.evict_minutes * 60

    def _evict_pod(self, pod: Any) -> tuple[str, bool]:
        """Asks for the eviction of a pod. Returns why it is refused, and whether for good; raises Unreachable."""
        meta = client.V1ObjectMeta(name=pod.metadata.name, namespace=pod.metadata.namespace)
        body = client.V1Eviction(metadata=meta)
        try:
            with _reachable(f"evict {pod.metadata.name}"):
                self._core.create_namespaced_pod_eviction(
                    pod.metadata.name, pod.metadata.namespace, body, _request_timeout=TIMEOUT_S
                )
        except ApiException as error:
            return ("" if error.status == 404 else _explain(error)), error.status not in NOT_NOW
        return "", False

    # --- reading ------------------------------------------------------------------------------------

    def _parse(self, node: Any, jobs: tuple[str, ...] = ()) -> SchedulerNode:
        _, healthy = self._gpus_of_node(node)
        return replace(parse_node(node, jobs, self._access.dedicated_taints), unusable=not healthy)

    def _list(self, call: Callable[..., Any], **more: Any) -> Iterator[Any]:
        token = None
        while True:
            page = call(limit=PAGE, _continue=token, _request_timeout=TIMEOUT_S, **more)
            yield from page.items
            token = page.metadata._continue
            if not token:
                return

    def _gpus_of_node(self, node: Any) -> tuple[int, int]:
        """Returns how many GPUs a node has, and how many of them its device plugin reports as healthy."""
        capacity, healthy = (
            int((of or {}).get(self._access.gpu_resource, 0)) for of in (node.status.capacity, node.status.allocatable)
        )
        return capacity, healthy

    def _jobs(self, pods: list[Any]) -> dict[str, SchedulerJob]:
        """Returns workloads: pods of one owner (Job, JobSet, PyTorchJob, ...) are one; a pod without one is its own."""
        nodes: dict[str, list[str]] = {}
        gpus: dict[str, int] = {}
        accounts: dict[str, str] = {}
        for pod in pods:
            if pod.spec.node_name is None or not may_evict(pod):
                continue
            owner = next((o.name for o in pod.metadata.owner_references or ()), pod.metadata.name)
            id_ = f"{pod.metadata.namespace}/{owner}"
            nodes.setdefault(id_, []).append(pod.spec.node_name)
            gpus[id_] = gpus.get(id_, 0) + sum(self._gpus_of(c) for c in pod.spec.containers)
            accounts[id_] = pod.metadata.namespace
        return {id_: SchedulerJob(id_, tuple(sorted(set(on))), gpus[id_], accounts[id_]) for id_, on in nodes.items()}

    def _gpus_of(self, container: Any) -> int:
        asked = (container.resources.requests or container.resources.limits or {}) if container.resources else {}
        return int(asked.get(self._access.gpu_resource, 0))


def parse_node(node: Any, jobs: tuple[str, ...], dedicated: Collection[str] = ()) -> SchedulerNode:
    """Returns a node. Its reason is our annotation, else the taints that keep work away.

    dedicated: keys of taints that only reserve nodes for their work, and take none out of service.
    """
    note = (node.metadata.annotations or {}).get(ANNOTATION, "")
    keeping = [t for t in (node.spec.taints or ()) if t.effect in KEEPING and t.key not in dedicated]
    ready = any(c.type == "Ready" and c.status == "True" for c in (node.status.conditions or ()))
    out = bool(node.spec.unschedulable) or bool(keeping) or not ready
    words = ["Ready" if ready else "NotReady", *(("SchedulingDisabled",) if node.spec.unschedulable else ())]
    taints = ", ".join(sorted(t.key for t in keeping))  # also ours, which stays if a person only uncordons the node
    reason = note if note.startswith(OWNER) and node.spec.unschedulable else taints
    absent = not ready and not node.spec.unschedulable and NO_ANSWER.issuperset(t.key for t in keeping)
    version = node.metadata.resource_version
    return SchedulerNode(node.metadata.name, out, ",".join(words), reason, jobs, version, absent)


def may_evict(pod: Any) -> bool:
    """Returns whether a pod is work that an eviction ends: not over, not of a DaemonSet, not static."""
    owners = {owner.kind for owner in pod.metadata.owner_references or ()}
    mirror = "kubernetes.io/config.mirror" in (pod.metadata.annotations or {})
    return not mirror and "DaemonSet" not in owners and pod.status.phase not in OVER


def _is_ending(pod: Any) -> bool:
    return pod.metadata.deletion_timestamp is not None


@contextmanager
def _reachable(what: str, reads: bool = False) -> Iterator[None]:
    """Raises Unreachable for what says nothing about the request: no answer, a login that is refused, a fault there.

    reads: also for refused acts: without the right to read, nothing is known about the node.
    """
    try:
        yield
    except ApiException as error:
        if reads or error.status in (0, 401) or (error.status or 0) >= 500:
            raise Unreachable(f"{what}: {_explain(error)}") from error
        raise
    except (HTTPError, OSError) as error:
        raise Unreachable(f"{what}: {error}") from error


def _explain(error: ApiException) -> str:
    """Returns the server's own words."""
    try:
        text = str(json.loads(error.body or "{}").get("message") or error.reason)
    except ValueError:
        text = str(error.reason)
    return f"{text} (HTTP {error.status})"
