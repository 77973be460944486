"""The Kubernetes deployment: Helm accepts the chart, a real apiserver accepts all objects, and rights are minimal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes_cluster import Cluster, ClusterError, missing
from tests.parts import do_without

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "fleetpulse-agent"
PLAIN = ROOT / "deploy" / "kubernetes"
CACHED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "helm" / "3.22.0" / "helm"
"""Path in which part_helm of deploy/parts.sh installs it."""
ALL_ON = {
    "kafka": {
        "bootstrapServers": "k1:9093",
        "securityProtocol": "SASL_SSL",
        "username": "agent",
        "existingSecret": "fleetpulse-kafka",
    },
    "config": "[site]\nname = 'a'\n[check]\nignore = [\"link_down\"]\n",
    "gpu": {"visibleBy": "mounts"},
    "jobs": {"readEnvironment": True},
    "host": {"root": True, "dbus": True},
    "extraCapabilities": ["SYSLOG"],
    "extraResources": {"squat.ai/kmsg": 1},
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "health"},
    "imagePullSecrets": [{"name": "registry"}],
    "affinity": {"nodeAffinity": {}},
    "extraEnv": [{"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "a=b"}],
    "extraVolumes": [{"name": "x", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    "watchers": {
        "row-7": {
            "config": "[site]\nname = 'a'\n",
            "existingSecret": "row-7-bmcs",
            "storage": "4Gi",
            "storageClassName": "fast",
        },
        "fabric-1": {
            "config": "",
            "image": "r/f:1",
            "extraResources": {"rdma/umad": 1},
            "hostNetwork": True,
            "nodeSelector": {"a": "b"},
        },
    },
}


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm") or (str(CACHED) if CACHED.exists() else None)
    if program is None:
        do_without("helm", "no helm here: run 'make parts'")
    more = ["--values", "-"] if values is not None else []
    return subprocess.run(
        [program, *words, *more], input=json.dumps(values or {}), capture_output=True, text=True, timeout=60
    )


def render(values: dict[str, Any] | None = None) -> str:
    done = helm("template", "fleetpulse-agent", str(CHART), "--namespace", "fleetpulse", values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.helm
@pytest.mark.parametrize("values", [{}, ALL_ON], ids=["default", "all on"])
def test_helm_lint_reports_nothing(values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.helm
def test_the_plain_manifest_equals_the_output_of_the_chart() -> None:
    head, text = (PLAIN / "daemonset.yaml").read_text().split("\n", 1)
    assert text == render(), f"{head.removeprefix('# Written from the chart by: ')} > deploy/kubernetes/daemonset.yaml"


@pytest.mark.helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu": {"visible": "env"}}, "visible"),
        ({"kafka": {"securityProtocol": "TLS"}}, "securityProtocol"),
        ({"kafka": {"bootstrapServers": "k:1", "securityProtocol": "SASL_SSL"}}, "kafka.username"),
        ({"kafka": {"bootstrapServers": "k:1", "securityProtocol": "SSL"}}, "kafka.existingSecret: wanted"),
        ({"nodeSelektor": {}}, "nodeSelektor"),
        ({"watchers": {"Row 7": {"config": ""}}}, "Row 7"),
        ({"watchers": {"row": {}}}, "config"),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    done = helm("template", "a", str(CHART), values=values)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        do_without("kubernetes", lacking)
    try:
        with Cluster(tmp_path_factory.mktemp("kubernetes")) as found:
            found.kubectl("apply", "-f", str(PLAIN / "namespace.yaml"))
            found.apply({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", **NVIDIA})
            found.kubectl("apply", "-n", "fleetpulse", "-f", str(PLAIN / "daemonset.yaml"))
            yield found
    except ClusterError as error:
        do_without("kubernetes", str(error))


@pytest.mark.kubernetes
@pytest.mark.helm
def test_helm_installs_upgrades_and_uninstalls_it_completely(cluster: Cluster) -> None:
    """As in docs/install.md, in a separate namespace."""
    cluster.kubectl("create", "namespace", "other")
    reach = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", "other")
    done = helm("install", "second", str(CHART), *reach, values={})
    assert done.returncode == 0, done.stderr
    done = helm("upgrade", "second", str(CHART), *reach, values=ALL_ON)
    assert done.returncode == 0, done.stderr
    kinds = "daemonsets,deployments,configmaps,serviceaccounts,clusterroles,clusterrolebindings"

    def ours() -> list[str]:
        found = cluster.kubectl("get", kinds, "-n", "other", "-l", "app.kubernetes.io/instance=second", "-o", "name")
        return found.split()

    assert len(ours()) == 9
    done = helm("uninstall", "second", *reach)
    assert done.returncode == 0, done.stderr
    cluster.wait("the end of all", lambda: ours() == [])


NVIDIA = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}


@pytest.mark.kubernetes
@pytest.mark.helm
@pytest.mark.parametrize("values", [{}, ALL_ON], ids=["default", "all on"])
def test_a_real_apiserver_accepts_all_objects_of_the_chart(cluster: Cluster, values: dict[str, Any]) -> None:
    words = ("apply", "--dry-run=server", "--validate=strict", "-n", "fleetpulse", "-o", "name", "-f", "-")
    made = cluster.kubectl(*words, given=render(values)).split()
    kinds = {name.split("/")[0].split(".")[0] for name in made}
    assert {"daemonset", "serviceaccount", "configmap", "clusterrole", "clusterrolebinding"} <= kinds
    assert ("deployment" in kinds) == ("persistentvolumeclaim" in kinds) == bool(values)


def daemonset(cluster: Cluster, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the DaemonSet as the apiserver would store it, with all defaults."""
    words = ("apply", "--dry-run=server", "-n", "fleetpulse", "-o", "json", "-f", "-")
    items = json.loads(cluster.kubectl(*words, given=render(values)))["items"]
    return next(item for item in items if item["kind"] == "DaemonSet")


@pytest.mark.kubernetes
@pytest.mark.helm
def test_no_container_is_privileged_and_each_right_is_requested(cluster: Cluster) -> None:
    pod = daemonset(cluster, {})["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "nvidia.com/gpu" not in container["resources"]["limits"]  # no GPU is taken from the scheduler
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/var/lib/fleetpulse", "/run/fleetpulse", "/tmp"]
    asked = daemonset(cluster, ALL_ON)["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]
    assert asked == {"drop": ["ALL"], "add": ["SYSLOG", "SYS_PTRACE", "DAC_READ_SEARCH"]}


@pytest.mark.kubernetes
def test_each_gpu_node_gets_a_pod_whatever_its_taints_and_no_other_node_does(cluster: Cluster) -> None:
    for name in ("gpu001", "gpu002", "cpu001"):
        cluster.node(name, {"nvidia.com/gpu": "8"})
    cluster.kubectl("label", "nodes", "gpu001", "gpu002", "nvidia.com/gpu.present=true")
    cluster.kubectl("taint", "nodes", "gpu002", "fleetpulse/sick=yes:NoExecute")

    def nodes() -> list[str]:
        form = "jsonpath={.items[*].spec.nodeName}"
        return sorted(cluster.kubectl("get", "pods", "-n", "fleetpulse", "-o", form).split())

    cluster.wait("pods of the agent", lambda: nodes() == ["gpu001", "gpu002"])


def pod_of(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": template["spec"]}


def pod_security_refusal(cluster: Cluster, level: str, pod: dict[str, Any]) -> str:
    """Returns the message of Pod Security of that level against a pod; empty if it admits it."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": level, "labels": labels}})
    try:
        cluster.kubectl("apply", "--dry-run=server", "-n", level, "-f", "-", given=json.dumps(pod))
    except ClusterError as refused:
        return str(refused)
    return ""


@pytest.mark.kubernetes
@pytest.mark.helm
def test_pod_security_forbids_the_namespaces_and_folders_of_the_host_and_nothing_else(cluster: Cluster) -> None:
    """Therefore the agent's namespace needs the level `privileged`, although its pods are not privileged."""
    pod = pod_of(daemonset(cluster, {})["spec"]["template"])
    said = pod_security_refusal(cluster, "baseline", pod)
    assert 'violates PodSecurity "baseline:latest"' in said
    kinds = said.split('baseline:latest": ')[1]
    assert kinds.startswith("host namespaces (hostNetwork=true, hostPID=true), hostPath volumes (")
    assert "capabilities" not in kinds
    assert "privileged" not in kinds
    pod["spec"] |= {"hostNetwork": False, "hostPID": False}
    pod["spec"]["volumes"] = [
        v | {"hostPath": None, "emptyDir": {}} if "hostPath" in v else v for v in pod["spec"]["volumes"]
    ]
    assert pod_security_refusal(cluster, "baseline", pod) == ""


@pytest.mark.kubernetes
@pytest.mark.helm
def test_a_watcher_of_a_row_fits_the_strictest_level(cluster: Cluster) -> None:
    words = ("apply", "--dry-run=server", "-n", "fleetpulse", "-o", "json", "-f", "-")
    items = json.loads(cluster.kubectl(*words, given=render(ALL_ON)))["items"]
    row = next(i for i in items if i["kind"] == "Deployment" and i["metadata"]["name"].endswith("row-7"))
    assert row["spec"]["replicas"] == 1
    assert pod_security_refusal(cluster, "restricted", pod_of(row["spec"]["template"])) == ""


@pytest.mark.kubernetes
def test_its_account_may_list_pods_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    account = cluster.account(tmp_path / "account", "fleetpulse-agent", "fleetpulse")
    token = (account / "token").read_text()
    assert asked(cluster, token, "GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dgpu001") == 200
    forbidden = [
        ("GET", "/api/v1/nodes"),
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/fleetpulse/configmaps"),
    ]
    forbidden += [("DELETE", "/api/v1/namespaces/fleetpulse/pods/x"), ("GET", "/api/v1/pods?watch=1")]
    forbidden += [("POST", "/api/v1/namespaces/fleetpulse/pods")]
    assert [asked(cluster, token, *request) for request in forbidden] == [403] * len(forbidden)
    rights = cluster.kubectl(
        *("auth", "can-i", "--list", "--as=system:serviceaccount:fleetpulse:fleetpulse-agent", "-n", "fleetpulse")
    )
    ours = [line.split() for line in rights.splitlines() if line.startswith(("pods", "*"))]
    assert ours == [["pods", "[]", "[]", "[get", "list]"]]


def asked(cluster: Cluster, token: str, method: str, path: str) -> int:
    import ssl

    request = urllib.request.Request(cluster.url + path, method=method, data=b"{}" if method == "POST" else None)
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        context = ssl.create_default_context(cafile=str(cluster.ca))
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_chart_and_product_have_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    lines = (CHART / "Chart.yaml").read_text().splitlines()
    assert {f"version: {version}", f"appVersion: {version}"} <= set(lines)
