"""Pods as jobs: polls the kubelet for pods with devices and the API server for their labels, in its own thread.

The kubelet's socket (pod-resources, v1) is polled once per interval. The API server is polled only for what the kubelet
does not have: for a new pod and every LABELS_INTERVAL_S, from its cache, for this node's pods alone.

The first of these labels decides a pod's job: JobSet, LeaderWorkerSet (each group is a job), Kubeflow's training
operator, Volcano, Job. A pod without them, or with labels that may not be read, is a job by itself. A label gives a
rank only if each pod is one: a pod with more than one device runs several ranks, numbered in their environment.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.jobs.process_identity import clean_name, parse_number
from agents.protobuf import ProtobufMessage
from pipeline.model.regular_files import read_regular_text
from pipeline.runtime.guides import guide

MAX_PODS = 1024
"""Most pods of a node that are kept. Chosen: kubelet's default allows 110, large nodes 500."""
MAX_DEVICES = 256
"""Most devices of one container. Chosen: twice the cores of a large Trainium node."""
ACCELERATOR_RESOURCES = (
    *("nvidia.com/", "amd.com/gpu", "aws.amazon.com/neuron", "google.com/tpu", "habana.ai/gaudi", "gpu.intel.com/"),
    *("intel.com/gpu",),
)
"""Prefixes of resource names that are accelerators, as their device plugins name them."""
JOB_LABEL = "fleetpulse/job"
"""The label that names a job by hand, also of a pod without an accelerator."""
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
# label of the job's name, labels joined to it, label of the rank
_JOB_LABELS = (
    ("jobset.sigs.k8s.io/jobset-name", (), ""),
    (
        "leaderworkerset.sigs.k8s.io/name",
        ("leaderworkerset.sigs.k8s.io/group-index",),
        "leaderworkerset.sigs.k8s.io/worker-index",
    ),
    ("training.kubeflow.org/job-name", (), ""),
    ("volcano.sh/job-name", (), ""),
    ("batch.kubernetes.io/job-name", (), _COMPLETION_INDEX),
    ("job-name", (), _COMPLETION_INDEX),
)
KEPT_LABELS = (
    *(label for name, joined, rank in _JOB_LABELS for label in (name, *joined, rank) if label),
    *("jobset.sigs.k8s.io/replicatedjob-name", "jobset.sigs.k8s.io/job-index", "jobset.sigs.k8s.io/job-global-index"),
    *("training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index", "volcano.sh/task-spec"),
    *("volcano.sh/task-index", "app.kubernetes.io/name", JOB_LABEL, "fleetpulse/rank", "fleetpulse/stage"),
)
"""Labels that are kept; others are ignored."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of this node. devices: of all its containers, in the plugin's words; requested: number of devices."""

    namespace: str
    name: str
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    requested: int = 0

    @property
    def job(self) -> str:
        """The name of its job, `NAMESPACE/NAME`."""
        return clean_name(f"{self.namespace}/{self.title}")

    @property
    def title(self) -> str:
        """The name of its job within the namespace."""
        own = self.labels.get(JOB_LABEL)
        for label, joined, _ in _JOB_LABELS:
            if own is None and label in self.labels:
                own = "-".join((self.labels[label], *(self.labels[one] for one in joined if one in self.labels)))
        return own or self.name

    @property
    def rank(self) -> int | None:
        """Its rank; None if the labels do not give one."""
        if (own := parse_number(self.labels.get("fleetpulse/rank"))) is not None:
            return own
        label = next((rank for name, _, rank in _JOB_LABELS if name in self.labels), "")
        return parse_number(self.labels.get(label)) if max(len(self.devices), self.requested) < 2 else None

    @property
    def stage(self) -> str:
        """Its pipeline stage; empty without the label."""
        return clean_name(self.labels.get("fleetpulse/stage", ""))


def parse_pod_resources(answer: bytes) -> dict[tuple[str, str], Pod]:
    """Returns (namespace, name) -> pod with accelerators, from a ListPodResourcesResponse of the kubelet's v1 API.

    Raises MalformedMessage if it is another message.
    """
    found: dict[tuple[str, str], Pod] = {}
    for pod in ProtobufMessage(answer).messages(1):
        held: dict[str, tuple[str, ...]] = {}
        for container in pod.messages(3):
            devices = tuple(_device_ids(container))
            if devices:
                held[container.text(1)] = devices
        key = pod.text(2), pod.text(1)
        if held and all(key) and len(found) < MAX_PODS:
            devices = tuple(dict.fromkeys(device for some in held.values() for device in some))
            found[key] = Pod(key[0], key[1], devices=devices, requested=len(devices))
    return found


def _device_ids(container: ProtobufMessage) -> Iterator[str]:
    """Yields the device ids of one container. An id occurs once per NUMA node; time-slicing appends `::N`."""
    left = MAX_DEVICES
    for devices in container.messages(2):
        resource = devices.text(1)
        if resource.startswith(ACCELERATOR_RESOURCES):
            # the number of a core is not the number of a device: no GPU entity has this name
            core = "core:" if resource.endswith("core") else ""
            for device in devices.texts(2)[:left]:
                left -= 1
                yield core + device[:200].partition("::")[0]


def parse_pod_list(answer: bytes) -> dict[tuple[str, str], Pod]:
    """Returns (namespace, name) -> pod with uid and kept labels, from the API server's PodList. Raises ValueError."""
    try:
        whole = json.loads(answer)
    except RecursionError:
        raise ValueError("not a PodList: nested too deeply") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("items"), list):
        raise ValueError("not a PodList: expected an object with `items`")
    found = {}
    for item in whole["items"][:MAX_PODS]:
        pod = _parse_pod(item)
        if pod is not None:
            found[pod.namespace, pod.name] = pod
    return found


def _parse_pod(item: Any) -> Pod | None:
    """Returns one pod; None if it has another shape or has ended."""
    facts, status = _nested_dict(item, "metadata"), _nested_dict(item, "status")
    space, name, uid = (facts.get(key) for key in ("namespace", "name", "uid"))
    if not (isinstance(space, str) and isinstance(name, str) and isinstance(uid, str)):
        return None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels = _nested_dict(item, "metadata", "labels")
    kept = {key: text[:63] for key in KEPT_LABELS if isinstance(text := labels.get(key), str)}  # 63: the longest label
    statuses = status.get("containerStatuses")
    ids = (one.get("containerID") for one in statuses if isinstance(one, dict)) if isinstance(statuses, list) else ()
    containers = tuple(one.rpartition("/")[2][:64] for one in ids if isinstance(one, str))
    return Pod(space, name, uid, kept, containers=containers[:64], requested=_count_requested(item))


def _count_requested(item: Any) -> int:
    """Returns the number of accelerators in the resource limits of a pod's containers."""
    containers = _nested_dict(item, "spec").get("containers")
    limits = (_nested_dict(one, "resources", "limits") for one in (containers if isinstance(containers, list) else ()))
    return sum(
        parse_number(str(n)) or 0
        for table in limits
        for key, n in table.items()
        if key.startswith(ACCELERATOR_RESOURCES)
    )


def _nested_dict(item: Any, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        item = item.get(key) if isinstance(item, dict) else None
    return item if isinstance(item, dict) else {}


def merge_pods(
    held: Mapping[tuple[str, str], Pod], known: Mapping[tuple[str, str], Pod], complete: bool
) -> tuple[Pod, ...]:
    """Returns each pod once, with the data of both sources.

    held: pods of the kubelet; labelled: pods of the API server. complete: whether the kubelet answered, so that a pod
    missing in `held` has no device. A pod without an accelerator is kept only if JOB_LABEL names its job.
    """
    found = []
    for key in dict.fromkeys((*held, *known)):
        pod, other = held.get(key), known.get(key)
        if pod is not None and other is not None:
            found.append(Pod(*key, other.uid, other.labels, pod.devices, other.containers, pod.requested))
        elif pod is not None:
            found.append(pod)
        elif other is not None and (JOB_LABEL in other.labels or (other.requested and not complete)):
            found.append(other)
    return tuple(found)


LABELS_INTERVAL_S = 300.0
"""Seconds between two requests for labels, which hardly change. Chosen: 10,000 nodes make 33 requests a second."""
RETRY_S = 30.0
"""Seconds before the next request after a failure. Chosen."""
TIMEOUT_S = 5.0
"""Longest wait for an answer; the kubelet's takes milliseconds."""
MAX_POD_LIST_BYTES = 16 << 20
"""Most bytes of the API server's answer: MAX_PODS of 16 KiB."""
MAX_POD_RESOURCES_BYTES = 4 << 20
"""Most bytes of the kubelet's answer: gRPC's own default."""
LIST_METHOD = "/v1.PodResourcesLister/List"


class PodListRefused(Exception):  # noqa: N818 - the API server's word
    """The API server did not return the pods; the message says why."""


@dataclass
class PodPoller:
    """Polls the pods of this node. problem: what failed in the last round, "" if nothing; pods: the last answers.

    socket: the kubelet's; account: folder of the service account; api: `https://HOST:PORT` of the API server.
    """

    socket: Path
    account: Path
    api: str
    node: str
    interval: float
    pods: tuple[Pod, ...] = ()
    problem: str = ""
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _labelled: dict[tuple[str, str], Pod] = field(default_factory=dict)
    _labels_read_at: float | None = None

    def is_available(self) -> bool:
        """Whether this node has a kubelet socket, or this is a pod with a service account."""
        return self.socket.exists() or bool(self.api and (self.account / "token").exists())

    def start_polling(self) -> None:
        """Starts the thread, once."""
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
            self._thread.start()

    def stop_polling(self) -> None:
        """Stops polling; a request in flight ends within TIMEOUT_S."""
        self._stop.set()
        self._thread = None

    def _run(self) -> None:
        stop, now = self._stop, 0.0
        while not stop.is_set():
            try:
                self.poll(now)
            except Exception as fault:  # noqa: BLE001 - a malformed answer must not end the polling; it is reported
                self.problem = f"{self.socket} or {self.api}: answer cannot be read: {type(fault).__name__}"
            now += self.interval
            stop.wait(self.interval)

    def poll(self, now: float) -> None:
        """Does one round. now: seconds since the first one."""
        troubles, answered = [], False
        held: dict[tuple[str, str], Pod] = {}
        if self.socket.exists():
            try:
                held, answered = self._read_pod_resources(), True
            except (OSError, ValueError) as error:
                troubles.append(f"{self.socket}: {error}")
                held = {(pod.namespace, pod.name): pod for pod in self.pods if pod.devices}
        if self.api and self._labels_due(now, held):
            self._labels_read_at = now
            try:
                self._labelled = parse_pod_list(self._read_pod_list())
            except (OSError, ValueError, PodListRefused) as error:
                self._labels_read_at = now + RETRY_S - LABELS_INTERVAL_S
                troubles.append(f"{self.api}: {error}")
        self.pods, self.problem = merge_pods(held, self._labelled, answered), "; ".join(troubles)

    def _labels_due(self, now: float, held: dict[tuple[str, str], Pod]) -> bool:
        if self._labels_read_at is None:
            return True
        chosen = any(JOB_LABEL in pod.labels and key not in held for key, pod in self._labelled.items())
        fresh = chosen or not held.keys() <= self._labelled.keys() or not self.socket.exists()
        return now - self._labels_read_at >= (RETRY_S if fresh else LABELS_INTERVAL_S)

    def _read_pod_resources(self) -> dict[tuple[str, str], Pod]:
        from agents.grpc import (
            CallFailed,
            call_once,  # here, so that a node without a kubelet does not pay for it
        )

        try:
            return parse_pod_resources(
                call_once(f"unix:{self.socket}", LIST_METHOD, b"", deadline=TIMEOUT_S, most=MAX_POD_RESOURCES_BYTES)
            )
        except CallFailed as error:
            raise OSError(str(error)) from None

    def _read_pod_list(self) -> bytes:
        """Returns the PodList of this node. Raises PodListRefused with the status if the account lacks the right."""
        import urllib.error
        import urllib.request
        from urllib.parse import quote

        from pipeline.http import certificates
        from pipeline.http.addresses import make_opener

        path = f"/api/v1/pods?fieldSelector={quote('spec.nodeName=' + self.node)}&resourceVersion=0"
        token = read_regular_text(self.account / "token").strip()  # each time: the kubelet renews it hourly
        trust = self.account / "ca.crt"
        context = certificates.trust(trust if trust.exists() else None)
        request = urllib.request.Request(self.api + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with make_opener(urllib.request.HTTPSHandler(context=context)).open(request, timeout=TIMEOUT_S) as answer:
                found: bytes = answer.read(MAX_POD_LIST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise PodListRefused(
                    f"status {error.code}; the account needs the right to list pods ({guide('jobs.md')})"
                ) from None
        if len(found) > MAX_POD_LIST_BYTES:
            raise PodListRefused(f"the list of pods has more than {MAX_POD_LIST_BYTES} bytes")
        return found


def cluster_api_url() -> str:
    """Returns the URL of the API server for a pod; empty outside of a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}" if host else ""
