"""Asks the kubelet which pods hold devices, and the API server for their labels, in a thread that no look waits for.

The kubelet's socket (pod-resources, v1) is asked once per interval. The API server is asked only for what the kubelet
cannot tell: when there is a pod that was not known, and every LABELS_S; from its cache, for this node's pods alone.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from agents.sources.jobs.pods import CHOSEN, Pod, joined, listed, resources

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
        from agents.sources.grpc.client import call  # here, so that a node without a kubelet does not pay for it
        from agents.sources.grpc.status import CallFailed

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

        from pipeline.outgoing import opener

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
