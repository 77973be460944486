"""Acts at a real Kubernetes: cordon and taint, Eviction under a disruption budget, rights, stale writes, tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.acts import ActLimits, KubernetesAccess
from pipeline.model.errors import Unreachable
from pipeline.store.database import Database
from tests import kubernetes_cluster
from tests.pipeline.acts_world import ALICE, ON, SchedulerSite
from tests.until import until

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]
LOOSE = ActLimits(rack_nodes=8, fleet_share=0.9, ceiling_share=1.0, two_people_gpus=1024)
ROLE = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kubernetes_cluster.Cluster]:
    with kubernetes_cluster.Cluster(tmp_path_factory.mktemp("kubernetes")) as made:
        for number in range(1, 5):
            made.node(f"gpu{number}", {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi", "pods": "110"})
        yield made


class Site(SchedulerSite):
    """A board whose executor works at the real API server."""

    def __init__(self, kubeconfig: Path, database: Database) -> None:
        from pipeline.acts.adapters.kubernetes import Kubernetes

        self.seconds = 0.0
        access = KubernetesAccess(kubeconfig, evict_minutes=10)
        self.kubernetes = Kubernetes(replace(ON, kubernetes=access), clock=lambda: self.seconds)
        super().__init__(database, LOOSE, self.kubernetes)


@pytest.fixture
def site(cluster: kubernetes_cluster.Cluster, database: Database) -> Site:
    return Site(cluster.kubeconfig, database)


def pod(name: str, node: str, **labels: str) -> dict[str, Any]:
    """A running pod with GPUs on a node."""
    resources = {"requests": {"nvidia.com/gpu": "8"}, "limits": {"nvidia.com/gpu": "8"}}
    container = {"name": "main", "image": "train", "resources": resources}
    meta = {"name": name, "namespace": "default", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": node, "containers": [container]}}


def is_running(cluster: kubernetes_cluster.Cluster, name: str) -> bool:
    return bool(cluster.read("pod", name)["status"].get("phase") == "Running")


def test_a_hold_cordons_taints_and_marks_and_a_release_undoes_all_three(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    act = site.propose("hold", "gpu1", incident="INC-1")
    site.approve(act)
    site.settle(act, "verified")
    node = cluster.read("node", "gpu1")
    assert node["spec"]["unschedulable"] is True
    assert {"key": "fleetpulse.io/held", "value": "true", "effect": "NoSchedule"} in node["spec"]["taints"]
    assert node["metadata"]["annotations"]["fleetpulse.io/held-for"] == f"{act.mark} INC-1 alice fault"
    release = site.propose("release", "gpu1")
    site.approve(release)
    site.settle(release, "verified")
    node = cluster.read("node", "gpu1")
    assert "unschedulable" not in node["spec"]
    assert not any(taint["key"] == "fleetpulse.io/held" for taint in node["spec"].get("taints", ()))
    assert "fleetpulse.io/held-for" not in node["metadata"]["annotations"]


def test_a_node_that_somebody_cordoned_is_refused_and_never_uncordoned(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    cluster.kubectl("cordon", "gpu2")
    for verb in ("hold", "release"):
        assert site.propose(verb, "gpu2").state == "refused"
    assert cluster.read("node", "gpu2")["spec"]["unschedulable"] is True
    cluster.kubectl("uncordon", "gpu2")


def test_a_persons_uncordon_is_recorded_and_not_fought(site: Site, cluster: kubernetes_cluster.Cluster) -> None:
    act = site.propose("hold", "gpu2")
    site.approve(act)
    site.settle(act, "verified")
    cluster.kubectl("uncordon", "gpu2")
    cluster.kubectl("taint", "node", "gpu2", "fleetpulse.io/held-")
    site.settle(act, "cancelled")
    site.run(2)
    assert "unschedulable" not in cluster.read("node", "gpu2")["spec"]


def test_an_eviction_respects_a_disruption_budget_and_says_which_pod_it_protects(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "train"}}}
    cluster.apply(
        pod("worker-0", "gpu3", app="train"),
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "train"}, "spec": budget},
    )
    until(lambda: is_running(cluster, "worker-0"), 60)
    until(lambda: cluster.read("pdb", "train").get("status", {}).get("currentHealthy") == 1, 60)
    hold = site.propose("hold", "gpu3")
    site.approve(hold)
    site.settle(hold, "verified")
    evict = site.propose("evict", "gpu3")
    assert evict.plan is not None
    assert [hit.job for hit in evict.plan.jobs] == ["default/worker-0"]
    site.approve(evict)
    site.run(2)
    other = site.propose("hold", "gpu4")  # a budget that protects a pod for minutes delays no other act
    assert (site.state(evict), other.state) == ("executing", "awaiting_approval")
    assert "disruption budget" in site.executor._waits[evict.id]
    site.board.cancel(other.id, ALICE, "not needed")
    site.seconds += 601
    site.settle(evict, "failed")
    reason = site.board.find(evict.id).result["reason"]
    assert "default/worker-0" in reason
    assert "disruption budget" in reason
    assert is_running(cluster, "worker-0")
    cluster.kubectl("delete", "pdb", "train")
    again = site.propose("evict", "gpu3")
    site.approve(again)
    site.settle(again, "verified")
    assert "worker-0" not in cluster.kubectl("get", "pods", "-o", "name")
    assert not site.kubernetes.is_waiting(again)


def test_a_taint_that_reserves_a_node_for_gpu_work_takes_it_not_out_of_service(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    cluster.kubectl("taint", "node", "gpu4", "nvidia.com/gpu=present:NoSchedule")  # as GKE does
    assert not site.kubernetes.read_state(0).nodes["gpu4"].out
    act = site.propose("hold", "gpu4")
    site.approve(act)
    site.settle(act, "verified")
    release = site.propose("release", "gpu4")
    site.approve(release)
    site.settle(release, "verified")
    assert [taint["key"] for taint in cluster.read("node", "gpu4")["spec"]["taints"]] == ["nvidia.com/gpu"]
    cluster.kubectl("taint", "node", "gpu4", "nvidia.com/gpu-")


def test_a_node_without_a_healthy_gpu_counts_as_out_of_service_and_can_be_held(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    def report(healthy: str) -> None:
        status = json.dumps({"status": {"allocatable": {"nvidia.com/gpu": healthy}}})
        cluster.kubectl("patch", "node", "gpu4", "--subresource=status", "--type=merge", "-p", status)

    report("0")
    try:
        world = site.kubernetes.read_state(site.now)
        assert ("gpu4" in world.nodes, "gpu4" in world.out, world.nodes["gpu4"].is_taken) == (True, True, False)
        hold = site.propose("hold", "gpu4")
        site.approve(hold)
        site.settle(hold, "verified")
        release = site.propose("release", "gpu4")
        site.approve(release)
        site.settle(release, "verified")
    finally:
        report("8")


def test_a_write_on_a_state_that_others_changed_is_refused_by_the_server_and_tried_again(
    site: Site, cluster: kubernetes_cluster.Cluster
) -> None:
    act = site.propose("hold", "gpu4")
    site.approve(act)
    patch, changes = site.kubernetes._core.patch_node, []

    def change_before(name: str, body: Any, **more: Any) -> Any:
        if not changes:
            changes.append(cluster.kubectl("label", "node", name, "touched=yes", "--overwrite"))
        return patch(name, body, **more)

    site.kubernetes._core.patch_node = change_before
    site.settle(act, "verified")
    labels = cluster.read("node", "gpu4")["metadata"]["labels"]
    assert (labels["touched"], len(changes)) == ("yes", 1)


def test_without_the_right_the_act_fails_with_the_servers_own_words(
    cluster: kubernetes_cluster.Cluster, database: Database, tmp_path: Path
) -> None:
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "weak"}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "weak"},
            "rules": ROLE,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "weak"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "weak"},
            "subjects": [{"kind": "ServiceAccount", "name": "weak", "namespace": "default"}],
        },
    )
    token = cluster.kubectl("create", "token", "weak").strip()
    weak = Site(write_kubeconfig(cluster, token, tmp_path), database)
    until(lambda: not weak.kubernetes.read_state(0).nodes["gpu1"].out, 60)  # its heartbeat may be late
    act = weak.propose("hold", "gpu1")
    assert act.state == "awaiting_approval", act.result
    weak.approve(act)
    weak.settle(act, "failed")
    assert 'cannot patch resource "nodes"' in weak.board.find(act.id).result["reason"]
    assert "HTTP 403" in weak.board.find(act.id).result["reason"]
    strong = Site(cluster.kubeconfig, database)
    hold = strong.propose("hold", "gpu2")
    strong.approve(hold)
    strong.settle(hold, "verified")
    cluster.apply(pod("kept", "gpu2"))
    until(lambda: is_running(cluster, "kept"), 30)
    held = strong.kubernetes.read_state(strong.now).nodes["gpu2"]
    refused = weak.kubernetes.carry_out(strong.propose("evict", "gpu2"), held)
    assert not refused.done, "a right that is missing is not waited for"
    assert "cannot create resource" in refused.output
    assert not weak.kubernetes.is_waiting(hold)


def test_an_expired_token_is_no_statement_about_the_node(
    cluster: kubernetes_cluster.Cluster, database: Database, tmp_path: Path
) -> None:
    site = Site(write_kubeconfig(cluster, "forged", tmp_path), database)
    with pytest.raises(Unreachable, match="HTTP 401"):
        site.kubernetes.read_state(0)
    act = site.board.propose("hold", ["node:gpu1"], ALICE, "fault")
    site.run(2)
    assert site.state(act) == "proposed"


def test_without_the_right_to_read_the_executor_waits_and_says_so(
    cluster: kubernetes_cluster.Cluster, database: Database, tmp_path: Path
) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "blind"}})
    token = cluster.kubectl("create", "token", "blind").strip()
    site = Site(write_kubeconfig(cluster, token, tmp_path), database)
    with pytest.raises(Unreachable, match=r'cannot list resource "nodes".*HTTP 403'):
        site.kubernetes.read_state(0)
    act = site.board.propose("hold", ["node:gpu1"], ALICE, "fault")
    site.run(2)
    assert site.state(act) == "proposed"


def write_kubeconfig(cluster: kubernetes_cluster.Cluster, token: str, folder: Path) -> Path:
    """Writes a kubeconfig of a bearer token."""
    file = folder / "kubeconfig"
    file.write_text(f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: {cluster.url}, certificate-authority: {cluster.ca}}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
""")
    return file
