"""Pods as jobs: which job and rank a pod is by its labels, and which devices the kubelet gave it.

Labels, first that is there: JobSet, LeaderWorkerSet (each group of it is a job), Kubeflow's training operator,
Volcano, Job. A pod with none of them, or whose labels may not be read, is a job by itself. A label tells a rank only
where each pod is one: a pod with more than one device runs several ranks, whose numbers are in its environment.

Asks the kubelet which pods hold devices, and the API server for their labels, in a thread that no look waits for.

The kubelet's socket (pod-resources, v1) is asked once per interval. The API server is asked only for what the kubelet
cannot tell: when there is a pod that was not known, and every LABELS_S; from its cache, for this node's pods alone.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.jobs.process_identity import clean, number
from agents.protobuf import Message

MAX_PODS = 1024
"""Most pods of a node that are kept; chosen: kubelet's default allows 110, large nodes 500."""
MAX_DEVICES = 256
"""Most devices of one container; chosen: twice the cores of a large Trainium node."""
RESOURCES = (
    *("nvidia.com/", "amd.com/gpu", "aws.amazon.com/neuron", "google.com/tpu", "habana.ai/gaudi", "gpu.intel.com/"),
    *("intel.com/gpu",),
)
"""Beginnings of names of resources that are accelerators, as their device plugins name them."""
CHOSEN = "fleetpulse/job"
"""The label by which somebody names a job, also of a pod without an accelerator."""
_COMPLETION = "batch.kubernetes.io/job-completion-index"
# label of the job's name, labels joined to it, label of the rank
_KINDS = (
    ("jobset.sigs.k8s.io/jobset-name", (), ""),
    (
        "leaderworkerset.sigs.k8s.io/name",
        ("leaderworkerset.sigs.k8s.io/group-index",),
        "leaderworkerset.sigs.k8s.io/worker-index",
    ),
    ("training.kubeflow.org/job-name", (), ""),
    ("volcano.sh/job-name", (), ""),
    ("batch.kubernetes.io/job-name", (), _COMPLETION),
    ("job-name", (), _COMPLETION),
)
KEPT = (
    *(label for name, joined, rank in _KINDS for label in (name, *joined, rank) if label),
    *("jobset.sigs.k8s.io/replicatedjob-name", "jobset.sigs.k8s.io/job-index", "jobset.sigs.k8s.io/job-global-index"),
    *("training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index", "volcano.sh/task-spec"),
    *("volcano.sh/task-index", "app.kubernetes.io/name", CHOSEN, "fleetpulse/rank", "fleetpulse/stage"),
)
"""Labels that are kept; others are not looked at."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of this node. devices: of all its containers, in their plugin's words; wants: how many it asks for."""

    namespace: str
    name: str
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    wants: int = 0

    @property
    def job(self) -> str:
        """Name of its job, `NAMESPACE/NAME`."""
        return clean(f"{self.namespace}/{self.title}")

    @property
    def title(self) -> str:
        """Its job's name among those of the name space."""
        own = self.labels.get(CHOSEN)
        for label, joined, _ in _KINDS:
            if own is None and label in self.labels:
                own = "-".join((self.labels[label], *(self.labels[one] for one in joined if one in self.labels)))
        return own or self.name

    @property
    def rank(self) -> int | None:
        """Its rank, where its labels tell that."""
        if (own := number(self.labels.get("fleetpulse/rank"))) is not None:
            return own
        label = next((rank for name, _, rank in _KINDS if name in self.labels), "")
        return number(self.labels.get(label)) if max(len(self.devices), self.wants) < 2 else None

    @property
    def stage(self) -> str:
        return clean(self.labels.get("fleetpulse/stage", ""))


def resources(answer: bytes) -> dict[tuple[str, str], Pod]:
    """ListPodResourcesResponse of the kubelet's v1 PodResourcesLister: pods that hold accelerators.

    Raises Malformed on what is no such message.
    """
    found: dict[tuple[str, str], Pod] = {}
    for pod in Message(answer).messages(1):
        held: dict[str, tuple[str, ...]] = {}
        for container in pod.messages(3):
            devices = tuple(_accelerators(container))
            if devices:
                held[container.text(1)] = devices
        key = pod.text(2), pod.text(1)
        if held and all(key) and len(found) < MAX_PODS:
            devices = tuple(dict.fromkeys(device for some in held.values() for device in some))
            found[key] = Pod(key[0], key[1], devices=devices, wants=len(devices))
    return found


def _accelerators(container: Message) -> Iterator[str]:
    """Device ids of one container; one id stands once per NUMA node, and time-slicing adds `::N` to it."""
    left = MAX_DEVICES
    for devices in container.messages(2):
        resource = devices.text(1)
        if resource.startswith(RESOURCES):
            # a core's number is no device's: it names a core, which no GPU of ours bears
            core = "core:" if resource.endswith("core") else ""
            for device in devices.texts(2)[:left]:
                left -= 1
                yield core + device[:200].partition("::")[0]


def listed(answer: bytes) -> dict[tuple[str, str], Pod]:
    """PodList of the API server, in JSON: namespace, name, uid, kept labels. Raises ValueError where it is none."""
    try:
        whole = json.loads(answer)
    except RecursionError:
        raise ValueError("no list of pods: nested without end") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("items"), list):
        raise ValueError("no list of pods: wanted an object with `items`")
    found = {}
    for item in whole["items"][:MAX_PODS]:
        pod = _pod(item)
        if pod is not None:
            found[pod.namespace, pod.name] = pod
    return found


def _pod(item: Any) -> Pod | None:
    """One pod; None if it has another shape, or has ended."""
    facts, status = _table(item, "metadata"), _table(item, "status")
    space, name, uid = (facts.get(key) for key in ("namespace", "name", "uid"))
    if not (isinstance(space, str) and isinstance(name, str) and isinstance(uid, str)):
        return None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels = _table(item, "metadata", "labels")
    kept = {key: text[:63] for key in KEPT if isinstance(text := labels.get(key), str)}  # 63: the longest label
    statuses = status.get("containerStatuses")
    ids = (one.get("containerID") for one in statuses if isinstance(one, dict)) if isinstance(statuses, list) else ()
    containers = tuple(one.rpartition("/")[2][:64] for one in ids if isinstance(one, str))
    return Pod(space, name, uid, kept, containers=containers[:64], wants=_wanted(item))


def _wanted(item: Any) -> int:
    """How many accelerators the containers of a pod have as their limit."""
    containers = _table(item, "spec").get("containers")
    limits = (_table(one, "resources", "limits") for one in (containers if isinstance(containers, list) else ()))
    return sum(number(str(n)) or 0 for table in limits for key, n in table.items() if key.startswith(RESOURCES))


def _table(item: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        item = item.get(key) if isinstance(item, dict) else None
    return item if isinstance(item, dict) else {}


def joined(
    held: Mapping[tuple[str, str], Pod], known: Mapping[tuple[str, str], Pod], complete: bool
) -> tuple[Pod, ...]:
    """Each pod once, with what either source says of it; a pod without an accelerator only if a label says `job`.

    held: by the kubelet; complete: whether it answered, so that who is not in it holds nothing. known: by the labels.
    """
    found = []
    for key in dict.fromkeys((*held, *known)):
        pod, other = held.get(key), known.get(key)
        if pod is not None and other is not None:
            found.append(Pod(*key, other.uid, other.labels, pod.devices, other.containers, pod.wants))
        elif pod is not None:
            found.append(pod)
        elif other is not None and (CHOSEN in other.labels or (other.wants and not complete)):
            found.append(other)
    return tuple(found)


LABELS_S = 300.0
"""Chosen: labels hardly ever change; 10,000 nodes ask 33 times a second in all."""
RETRY_S = 30.0
"""How long a refusal of the API server holds; chosen."""
PATIENCE_S = 5.0
"""Longest answer; the kubelet's takes milliseconds."""
MOST_LABELS = 16 << 20
"""Most bytes of the API server's answer: MAX_PODS of 16 KiB."""
MOST_RESOURCES = 4 << 20
"""Most bytes of the kubelet's answer: gRPC's own default."""
LIST = "/v1.PodResourcesLister/List"


class Refused(Exception):  # noqa: N818 - the API server's word
    """The API server did not give the pods; the text says why."""


@dataclass
class Kubelet:
    """socket: the kubelet's; account: folder of the service account; api: `https://HOST:PORT` of the API server.

    `trouble` is what could not be had, "" if all was; `pods` are those of the last answers.
    """

    socket: Path
    account: Path
    api: str
    node: str
    every: float
    pods: tuple[Pod, ...] = ()
    trouble: str = ""
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _known: dict[tuple[str, str], Pod] = field(default_factory=dict)
    _asked: float | None = None

    def present(self) -> bool:
        """Whether this node has a kubelet that lets us ask, or this is a pod with an account."""
        return self.socket.exists() or bool(self.api and (self.account / "token").exists())

    def start(self) -> None:
        """Begins to ask; once."""
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends; what is under way ends within PATIENCE_S by itself."""
        self._stop.set()
        self._thread = None

    def _run(self) -> None:
        stop, now = self._stop, 0.0
        while not stop.is_set():
            try:
                self.ask(now)
            except Exception as fault:  # noqa: BLE001 - an odd answer must not end all asking; it is told
                self.trouble = f"{self.socket} or {self.api}: answer cannot be read: {type(fault).__name__}"
            now += self.every
            stop.wait(self.every)

    def ask(self, now: float) -> None:
        """One round. now: seconds since the first one."""
        troubles, answered = [], False
        held: dict[tuple[str, str], Pod] = {}
        if self.socket.exists():
            try:
                held, answered = self._resources(), True
            except (OSError, ValueError) as error:
                troubles.append(f"{self.socket}: {error}")
                held = {(pod.namespace, pod.name): pod for pod in self.pods if pod.devices}
        if self.api and self._due(now, held):
            self._asked = now
            try:
                self._known = listed(self._labels())
            except (OSError, ValueError, Refused) as error:
                self._asked = now + RETRY_S - LABELS_S
                troubles.append(f"{self.api}: {error}")
        self.pods, self.trouble = joined(held, self._known, answered), "; ".join(troubles)

    def _due(self, now: float, held: dict[tuple[str, str], Pod]) -> bool:
        if self._asked is None:
            return True
        chosen = any(CHOSEN in pod.labels and key not in held for key, pod in self._known.items())
        fresh = chosen or not held.keys() <= self._known.keys() or not self.socket.exists()
        return now - self._asked >= (RETRY_S if fresh else LABELS_S)

    def _resources(self) -> dict[tuple[str, str], Pod]:
        from agents.grpc import (
            CallFailed,
            call,  # here, so that a node without a kubelet does not pay for it
        )

        try:
            return resources(call(f"unix:{self.socket}", LIST, b"", deadline=PATIENCE_S, most=MOST_RESOURCES))
        except CallFailed as error:
            raise OSError(str(error)) from None

    def _labels(self) -> bytes:
        """PodList of this node. Raises Refused with the server's own words where the account lacks the right."""
        import ssl
        import urllib.error
        import urllib.request
        from urllib.parse import quote

        from pipeline.http.addresses import opener

        path = f"/api/v1/pods?fieldSelector={quote('spec.nodeName=' + self.node)}&resourceVersion=0"
        token = (self.account / "token").read_text().strip()  # each time anew: kubelet renews it hourly
        trust = self.account / "ca.crt"
        context = ssl.create_default_context(cafile=str(trust) if trust.exists() else None)
        request = urllib.request.Request(self.api + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with opener(urllib.request.HTTPSHandler(context=context)).open(request, timeout=PATIENCE_S) as answer:
                found: bytes = answer.read(MOST_LABELS + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(f"status {error.code}; wanted the right to list pods (docs/jobs.md)") from None
        if len(found) > MOST_LABELS:
            raise Refused(f"more than {MOST_LABELS} bytes of pods")
        return found


def in_cluster() -> str:
    """Where a pod finds the API server; empty outside of one."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}" if host else ""
