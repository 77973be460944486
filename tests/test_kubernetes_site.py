"""The chart of a whole site: Helm and a real apiserver accept it, and its rights, services and secrets are minimal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.arguments import COMMANDS
from pipeline.config.sections import load_config
from tests import test_kubernetes_deployment as deployment
from tests.kubernetes_cluster import Cluster, ClusterError, missing
from tests.parts import do_without
from tests.test_kubernetes_deployment import helm

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "fleetpulse"
LEAST: dict[str, Any] = {"kafka": {"bootstrapServers": "k1:9092"}, "agent": {"kafka": {"bootstrapServers": "k1:9092"}}}
SERVER: dict[str, Any] = {"agent": {"enabled": False}}
ALL_ON: dict[str, Any] = {
    "kafka": {
        "bootstrapServers": "k1:9093",
        "securityProtocol": "SASL_SSL",
        "username": "pipeline",
        "existingSecret": "fleetpulse-kafka",
    },
    "config": "[store]\ntelemetry_days = 7\n",
    "global": {"site": "east-1"},
    "existingSecret": "fleetpulse-keys",
    "imagePullSecrets": [{"name": "registry"}],
    "pipeline": {"storageClassName": "local", "nodeSelector": {"a": "b"}, "priorityClassName": "high"},
    "dashboard": {"replicas": 2, "tolerations": [{"operator": "Exists"}], "podAnnotations": {"a/b": "c"}},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a/b": "c"}},
    "executor": {"enabled": True, "existingSecret": "executor"},
    "podDisruptionBudget": {"maxUnavailable": 0},
    "agent": {"kafka": {"bootstrapServers": "k1:9093"}},
}
MONITOR = {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
CASES = pytest.mark.parametrize("values", [LEAST, ALL_ON], ids=["least", "all on"])


class Strict(yaml.SafeLoader):
    """Refuses a key that stands twice in one map, as Flux and kustomize do; Helm and PyYAML take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"found {twice} twice, expected once", node.start_mark)
        return super().construct_mapping(node, deep)


def render(values: dict[str, Any], namespace: str = "fleetpulse") -> list[dict[str, Any]]:
    done = helm("template", "site", str(CHART), "--namespace", namespace, values=values)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, Strict) if found]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def servers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods of pipeline, dashboard, executor and topics, without the agent's."""
    kinds = [*of_kind(objects, "StatefulSet"), *of_kind(objects, "Deployment"), *of_kind(objects, "Job")]
    return [one["spec"]["template"]["spec"] for one in kinds]


@pytest.mark.helm
@CASES
def test_helm_lint_reports_nothing(values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.helm
@pytest.mark.parametrize(
    ("chart", "values"),
    [(CHART, LEAST), (CHART, ALL_ON | MONITOR), (deployment.CHART, {}), (deployment.CHART, deployment.ALL_ON)],
    ids=["site, least", "site, all on", "agent, default", "agent, all on"],
)
def test_no_key_stands_twice_in_what_a_chart_writes(chart: Path, values: dict[str, Any]) -> None:
    """The labels of a Service named `app.kubernetes.io/instance` twice, and Flux refused the chart."""
    done = helm("template", "site", str(chart), values=values)
    assert done.returncode == 0, done.stderr
    assert [one["kind"] for one in yaml.load_all(done.stdout, Strict) if one]
    with pytest.raises(yaml.constructor.ConstructorError, match=r"\['a'\] twice"):
        yaml.load("{a: 1, b: 2, a: 1}", Strict)


@pytest.mark.helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (SERVER, "kafka.bootstrapServers: wanted"),
        ({**SERVER, "kafka": {"bootstrapServers": "k:1", "securityProtocol": "SASL_SSL"}}, "kafka.username: wanted"),
        ({**LEAST, "executor": {"enabled": True}}, "executor.existingSecret: wanted"),
        ({**LEAST, "podDisruptionBudget": {"maxUnavailable": 2}}, "maxUnavailable"),
        ({**LEAST, "pipeline": {"replicas": 2}}, "replicas"),
        ({**LEAST, "ingres": {"enabled": True}}, "ingres"),
        ({"kafka": {"bootstrapServers": "k:99999"}}, "bootstrapServers"),
        ({"kafka": {"bootstrapServers": "k:1,nowhere"}}, "bootstrapServers"),
        ({**LEAST, "agent": {"kafka": {"bootstrapServers": "k:0"}}}, "bootstrapServers"),
        ({**LEAST, "pipeline": {"storage": "banana"}}, "storage"),
        ({**LEAST, "pipeline": {"memoryLimit": "lots"}}, "memoryLimit"),
        ({**LEAST, "pipeline": {"memoryLimit": "4Gi"}}, "memoryLimit"),
        ({**LEAST, "serviceMonitor": {"interval": "often"}}, "interval"),
        ({**LEAST, "image": {"tag": 1.1}}, "tag"),
        ({**LEAST, "ingress": {"enabled": True, "host": "a: b"}}, "host"),
        ({**LEAST, "agent": {"nodeSelektor": {}}}, "nodeSelektor"),
        ({"kafka": {"bootstrapServers": "k:1"}}, "agent.kafka.bootstrapServers: wanted"),
        ({**LEAST, "global": {"site": "east/1"}}, "site"),
        ({**SERVER, "kafka": {"bootstrapServers": "k:1", "securityProtocol": "SSL"}}, "kafka.existingSecret: wanted"),
        (
            {**SERVER, "kafka": {"bootstrapServers": "k:1", "securityProtocol": "SASL_PLAINTEXT", "username": "u"}},
            "kafka.existingSecret: wanted",
        ),
    ],
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    done = helm("template", "a", str(CHART), values=values)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.helm
@pytest.mark.parametrize("servers", ["k:1", "k-1.kafka.svc:65535, k2:9092", "[2001:db8::1]:9093,k:10000"])
@pytest.mark.parametrize("storage", ["100Gi", "1.5Ti", "1e12", "500000000000"])
def test_brokers_and_sizes_of_every_form_are_taken(servers: str, storage: str) -> None:
    values = {
        **LEAST,
        "kafka": {"bootstrapServers": servers},
        "pipeline": {"storage": storage, "memoryLimit": "0.5 GiB"},
    }
    done = helm("template", "a", str(CHART), values=values)
    assert done.returncode == 0, done.stderr


@pytest.mark.helm
def test_agents_and_server_have_the_one_name_of_the_site() -> None:
    named = []
    for pod in [*of_kind(render(ALL_ON), "DaemonSet"), *of_kind(render(ALL_ON), "StatefulSet")]:
        env = pod["spec"]["template"]["spec"]["containers"][0]["env"]
        named += [one["value"] for one in env if one["name"] == "FLEETPULSE__SITE__NAME"]
    assert named == ["east-1", "east-1"]


@pytest.mark.helm
def test_releases_in_two_namespaces_have_rights_of_their_own() -> None:
    rights = [
        {one["metadata"]["name"] for kind in ("ClusterRole", "ClusterRoleBinding") for one in of_kind(found, kind)}
        for found in (render(ALL_ON), render(ALL_ON, "other"))
    ]
    assert len(rights[0]) == len(rights[1]) == 2  # of the agent and of the executor
    assert rights[0].isdisjoint(rights[1])


@pytest.mark.helm
def test_a_release_whose_agents_would_have_the_names_of_its_server_is_refused() -> None:
    done = helm("template", "fleetpulse-agent", str(CHART), values=LEAST)
    assert done.returncode != 0
    assert "release name fleetpulse-agent" in done.stderr


@pytest.mark.helm
def test_the_api_stays_reachable_while_the_fleet_is_silent() -> None:
    services = [s for s in of_kind(render(LEAST), "Service") if "pipeline" in s["metadata"]["name"]]
    assert len(services) == 2
    assert all(service["spec"]["publishNotReadyAddresses"] for service in services)
    (pipeline,) = servers(render(LEAST))[0]["containers"]
    assert "readinessProbe" not in pipeline
    assert pipeline["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.helm
@CASES
def test_no_pod_of_the_server_has_a_right_beyond_a_plain_process(values: dict[str, Any]) -> None:
    for pod in servers(render(values)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_executor = pod["containers"][0]["name"] == "executor"
        assert pod["automountServiceAccountToken"] is is_executor
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["args"][0] in COMMANDS
            assert "memory" in container["resources"]["limits"]


@pytest.mark.helm
@CASES
def test_every_variable_of_the_chart_is_a_key_of_the_configuration(values: dict[str, Any]) -> None:
    for pod in servers(render(values)):
        environ = {one["name"]: one["value"] for one in pod["containers"][0].get("env", [])}
        load_config(None, {name: value for name, value in environ.items() if name.startswith("FLEETPULSE__")})


@pytest.mark.helm
def test_only_dashboard_executor_and_monitoring_reach_the_api() -> None:
    objects = render(ALL_ON)
    policy = next(p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"].endswith("pipeline"))
    labels = [s["spec"]["template"]["metadata"]["labels"] for s in of_kind(objects, "StatefulSet")]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels[0].items()
    (rule,) = policy["spec"]["ingress"]
    pods = [one["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for one in rule["from"] if "podSelector" in one]
    assert pods == ["fleetpulse-dashboard", "fleetpulse-executor"]
    (space,) = [one["namespaceSelector"] for one in rule["from"] if "namespaceSelector" in one]
    assert space["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


@pytest.mark.helm
def test_prometheus_gets_one_token_alone() -> None:
    objects = render(LEAST | MONITOR)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    (secret,) = [s for s in of_kind(objects, "Secret") if s["metadata"]["name"].endswith("tokens")]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "operator"}
    assert f"operator:{secret['stringData']['operator']}" in secret["stringData"]["tokens"].split("\n")
    services = of_kind(objects, "Service")
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    assert [s["spec"].get("clusterIP") for s in services if chosen <= s["metadata"]["labels"].items()] == [None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        do_without("kubernetes", lacking)
    try:
        with Cluster(tmp_path_factory.mktemp("kubernetes")) as found:
            found.kubectl("create", "namespace", "fleetpulse")
            yield found
    except ClusterError as error:
        do_without("kubernetes", str(error))


@pytest.mark.kubernetes
@pytest.mark.helm
@CASES
def test_a_real_apiserver_accepts_all_objects(cluster: Cluster, values: dict[str, Any]) -> None:
    objects = render(values)
    words = ("apply", "--dry-run=server", "--validate=strict", "-n", "fleetpulse", "-o", "name", "-f", "-")
    made = cluster.kubectl(*words, given="\n---\n".join(map(json.dumps, objects))).split()
    assert len(made) == len(objects) > 12


@pytest.mark.kubernetes
@pytest.mark.helm
def test_the_strictest_pod_security_admits_every_pod_of_the_server(cluster: Cluster) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": labels}})
    for pod in servers(render({**ALL_ON, "pipeline": {}})):
        spec = {key: value for key, value in pod.items() if key != "serviceAccountName"}
        one = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        if "state" in {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}:
            spec["volumes"] = [*spec["volumes"], {"name": "state", "emptyDir": {}}]  # a claim of the StatefulSet
        cluster.kubectl("apply", "--dry-run=server", "-n", "strict", "-f", "-", given=json.dumps(one))


@pytest.mark.kubernetes
@pytest.mark.helm
def test_an_upgrade_keeps_the_tokens_and_an_uninstall_leaves_only_them_and_the_volume(cluster: Cluster) -> None:
    reach = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", "fleetpulse", "--no-hooks")

    def tokens() -> str:
        return cluster.kubectl("get", "secret", "site-fleetpulse-tokens", "-n", "fleetpulse", "-o", "jsonpath={.data}")

    done = helm("install", "site", str(CHART), *reach, values=LEAST)
    assert done.returncode == 0, done.stderr
    before = tokens()
    done = helm("upgrade", "site", str(CHART), *reach, values={**ALL_ON, "pipeline": {}})
    assert done.returncode == 0, done.stderr
    assert tokens() == before
    done = helm("uninstall", "site", *reach)
    assert done.returncode == 0, done.stderr
    assert tokens() == before
    kinds = "statefulsets,daemonsets,deployments,services,ingresses,networkpolicies,poddisruptionbudgets,configmaps"
    instance = "app.kubernetes.io/instance=site"

    def left() -> str:
        return cluster.kubectl("get", kinds, "-n", "fleetpulse", "-l", instance, "-o", "name").strip()

    cluster.wait("the end of all", lambda: left() == "")


@pytest.mark.kubernetes
@pytest.mark.helm
def test_every_pod_of_a_site_is_scheduled_and_started_once_its_volume_is_bound(cluster: Cluster) -> None:
    for name in ("gpu001", "gpu002", "cpu001"):
        cluster.node(name, {})
    cluster.kubectl("label", "node", "gpu001", "gpu002", "nvidia.com/gpu.present=true")
    volume = {"capacity": {"storage": "1Ti"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/srv"}}
    # a claim that an uninstalled site left, as it must, would take any volume
    volume["claimRef"] = {"namespace": "fleetpulse", "name": "state-run-fleetpulse-pipeline-0"}
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"}, "spec": volume},
        {**runtime, "handler": "nvidia"},
    )
    values = {**LEAST, "executor": {"enabled": True, "existingSecret": "e"}, "agent": LEAST["agent"]}
    reach = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", "fleetpulse")
    done = helm(
        "install", "run", str(CHART), *reach, "--no-hooks", values=values
    )  # no kubelet would end the hook's job
    assert done.returncode == 0, done.stderr

    def pods() -> list[tuple[str, ...]]:
        form = "custom-columns=:.metadata.name,:.status.phase,:.spec.nodeName"
        words = ("get", "pods", "-n", "fleetpulse", "-l", "app.kubernetes.io/instance=run", "-o", form)
        return [tuple(line.split()) for line in cluster.kubectl(*words, "--no-headers").splitlines()]

    cluster.wait("five pods", lambda: sum(phase == "Running" for _, phase, _ in pods()) == 5)
    assert sorted(node for name, _, node in pods() if name.startswith("run-agent")) == ["gpu001", "gpu002"]
    parts = {name.split("-")[2] for name, _, _ in pods() if not name.startswith("run-agent")}
    assert parts == {"pipeline", "dashboard", "executor"}
    drain_node_of_a_failing_pod(cluster, "run-fleetpulse-pipeline")
    done = helm("uninstall", "run", *reach, "--no-hooks")
    assert done.returncode == 0, done.stderr
    cluster.wait("the end of all", lambda: pods() == [])


def drain_node_of_a_failing_pod(cluster: Cluster, name: str) -> None:
    """A pod that is not ready, as in a crash loop, has no service to protect: its budget must not hold a drain up."""
    pod, where = f"{name}-0", ("-n", "fleetpulse")
    found = cluster.read("pod", pod, "fleetpulse")
    failing = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    words = ("--subresource=status", "--type=strategic", "-p", json.dumps({"status": {"conditions": [failing]}}))
    cluster.kubectl("patch", "pod", pod, *where, *words)
    form = "jsonpath={.status.currentHealthy}"
    cluster.wait(
        "the budget without a ready pod", lambda: cluster.kubectl("get", "pdb", name, *where, "-o", form) == "0"
    )
    node = found["spec"]["nodeName"]
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=45s")
    uid = found["metadata"]["uid"]
    cluster.wait("a new pod", lambda: cluster.read("pod", pod, "fleetpulse")["metadata"]["uid"] != uid)
