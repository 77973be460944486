"""A real Kubernetes control plane on loopback: etcd, apiserver, controllers, scheduler; kwok simulates the kubelets.

    with Cluster(folder) as cluster:
        cluster.kubectl("apply", "-f", "pod.yaml")

Its programs are those of tests/kubernetes_build.py. Nothing runs in a pod: kwok only reports it as running.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import kubernetes_build
from tests.daemons import DaemonCluster, Daemons, free_ports

__all__ = ["Cluster", "ClusterError", "missing"]

missing = kubernetes_build.missing
READY_S, STOP_S = 240.0, 15.0
"""Chosen: a start takes 4-7 s on two idle cores; with a busy machine twenty times as long."""
KUBELET_GRACE = "30m"
"""How long a node may be silent before it counts as not ready. Chosen: kwok speaks for all kubelets, is starved on busy
machines, and is away while the API server is; Kubernetes waits 50 s, and after that nodes are out by themselves."""
CONTROLLERS = (
    *("disruption-controller", "node-lifecycle-controller", "taint-eviction-controller", "serviceaccount-controller"),
    *("deployment-controller", "replicaset-controller", "daemonset-controller", "job-controller"),
    *("statefulset-controller", "persistentvolume-binder-controller"),
    *("namespace-controller", "garbage-collector-controller", "root-ca-certificate-publisher-controller"),
)


class ClusterError(Exception):
    """Kubernetes did not start, or refused a command; the text gives the reason."""


class Cluster(DaemonCluster):
    """`kubeconfig` belongs to an administrator; `url` and `ca` are for clients that send HTTP themselves."""

    def __init__(self, folder: Path, kwok: bool = True) -> None:
        self.folder, self._kwok = folder.resolve(), kwok
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ports = free_ports(3)
        self.url = f"https://127.0.0.1:{self._ports[0]}"
        self.ca = self.folder / "certs" / "apiserver.crt"
        self.kubeconfig = self.folder / "kubeconfig"
        self._daemons = Daemons(self.folder, ClusterError, READY_S, STOP_S)
        self.wait = self._daemons.wait

    # --- commands ----------------------------------------------------------------------------------------------------

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """Returns the output of kubectl with the administrator's rights. Raises ClusterError with its message."""
        done = self._kubectl(*words, given=given)
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(words)}: status {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Creates or changes objects."""
        self.kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def read(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def node(self, name: str, allocatable: Mapping[str, str]) -> None:
        """A node that kwok keeps ready."""
        capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", **allocatable}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}},
                "status": {"capacity": capacity, "allocatable": capacity},
            }
        )
        status = json.dumps({"status": {"capacity": capacity, "allocatable": capacity}})
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", status)
        self.wait(f"node {name}", lambda: '"Ready","True"' in self._conditions(name))

    def account(self, folder: Path, name: str, namespace: str = "default") -> Path:
        """Returns the files that a pod of that service account gets: token and ca.crt."""
        folder.mkdir(parents=True)
        (folder / "token").write_text(self.kubectl("create", "token", name, "-n", namespace))
        (folder / "ca.crt").write_bytes(self.ca.read_bytes())
        return folder

    # --- start and stop ----------------------------------------------------------------------------------------------

    def _conditions(self, node: str) -> str:
        form = 'jsonpath={range .status.conditions[*]}"{.type}","{.status}";{end}'
        return self._kubectl("get", "node", node, "-o", form).stdout

    def _kubectl(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        program = [str(kubernetes_build.parts()), "kubectl", *words]
        environ = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        return subprocess.run(program, input=given, env=environ, capture_output=True, text=True, timeout=60)

    def _configure(self) -> None:
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f'{token},admin,1,"system:masters"\n')
        for words in (("genrsa", "-out", "sa.key", "2048"), ("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")):
            subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def _start(self) -> None:
        own = ("--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--secure-port=0")
        as_user = [f"--{kind}-kubeconfig={self.kubeconfig}" for kind in ("authentication", "authorization")]
        etcd = f"http://127.0.0.1:{self._ports[1]}"
        peers = f"http://127.0.0.1:{self._ports[2]}"
        self._part(
            *("etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={etcd}"),
            *(f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}", "--unsafe-no-fsync"),
            *(f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}", "--log-level=warn"),
        )
        self.start_apiserver()
        grace = f"--node-monitor-grace-period={KUBELET_GRACE}"
        self._part("kube-controller-manager", *own, f"--controllers={','.join(CONTROLLERS)}", grace)
        self._part("kube-scheduler", *own, *as_user)
        if self._kwok:
            stages = f"--config={kubernetes_build.stages()}"
            self._spawn("kwok", kubernetes_build.kwok(), *own[:2], stages, "--manage-all-nodes=true")
        self.wait("namespace", lambda: not self._kubectl("get", "serviceaccount", "default").returncode)

    def start_apiserver(self) -> None:
        """Starts the API server, and waits until it is ready."""
        etcd = f"http://127.0.0.1:{self._ports[1]}"
        self._part(
            *("kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={self._ports[0]}"),
            *("--bind-address=127.0.0.1", f"--cert-dir={self.ca.parent}", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={self.folder}/tokens.csv", "--service-cluster-ip-range=10.96.0.0/16"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *(f"--service-account-{use}={self.folder}/{file}" for use, file in _KEYS),
            # no controller gives pods their service account here
            *("--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"),
        )
        self.wait("apiserver", self._is_ready)

    def kill_apiserver(self) -> None:
        """Kills the API server; its state is in etcd."""
        self._daemons.kill("kube-apiserver")

    def _is_ready(self) -> bool:
        return self._kubectl("get", "--raw", "/readyz").stdout == "ok"

    def _part(self, name: str, *words: str) -> None:
        self._spawn(name, kubernetes_build.parts(), name, *words)

    def _spawn(self, name: str, program: Path, *words: str) -> None:
        environ = {**os.environ, "HOME": str(self.folder), "KUBECONFIG": str(self.kubeconfig)}
        self._daemons.spawn(name, [str(program), *words], environ, f"{name}.log")

    def close(self) -> None:
        """Stops all: etcd gets time to write; the apiserver, which would wait for its watches, has no state."""
        self._daemons.close(gently=("etcd",))


_KEYS = (("key-file", "sa.pub"), ("signing-key-file", "sa.key"))
