"""Real pods as jobs: a real API server, kwok for the kubelet, a real gRPC server as its pod-resources socket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.jobs.jobs import Jobs
from pipeline.model.records import Event
from tests.agents.kubelet_double import KubeletDouble
from tests.kubernetes_cluster import Cluster, missing
from tests.parts import do_without

NODE = "n042"
UUIDS = tuple(f"GPU-{number:08d}-1111-2222-3333-444444444444" for number in range(8))

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        do_without("kubernetes", lacking)
    with Cluster(tmp_path_factory.mktemp("kubernetes")) as found:
        found.node(NODE, {"nvidia.com/gpu": "8"})
        yield found


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletDouble]:
    with KubeletDouble(tmp_path) as found:
        yield found


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """NVIDIA's folder of /proc with eight GPUs."""
    for number, uuid in enumerate(UUIDS):
        folder = tmp_path / "driver" / f"0000:{0x10 + number:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {7 - number}\n"
        )
    return tmp_path / "driver"


def job(name: str, pods: int, gpus: int) -> dict[str, Any]:
    container = {"name": "train", "image": "none", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    spec = {"restartPolicy": "Never", "nodeName": NODE, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"completions": pods, "parallelism": pods, "completionMode": "Indexed", "template": {"spec": spec}},
    }


def account(cluster: Cluster, folder: Path, name: str, allowed: bool) -> Path:
    """A service account with or without the right to list pods."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    role = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]}
    of = {"apiGroup": rbac, "kind": "ClusterRole", "name": name}
    binding = {"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name}}
    if allowed:
        cluster.apply(role, {**binding, "roleRef": of, "subjects": [subject]})
    return cluster.account(folder / name, name)


def collector(cluster: Cluster, kubelet: KubeletDouble, driver: Path, account: Path) -> Jobs:
    empty = driver.parent / "proc"
    empty.mkdir()
    (empty / "stat").touch()
    made = Jobs(
        *(1.0, 5.0),
        proc=empty,
        facts=empty,
        driver=driver,
        pod_resources=kubelet.socket,
        account=account,
        api=cluster.url,
    )
    made.open(NODE)
    return made


def read_until(jobs: Jobs, wanted: str, limit: float = 40.0) -> Event:
    """Reads until an event of the kind comes; pods are polled in a thread, so this takes real time."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        for event in jobs.read()[0].events:
            if event.kind == wanted:
                return event
        time.sleep(0.3)
    raise AssertionError(f"no {wanted} within {limit:g} s: {jobs.inventory()}")


def pods_of(cluster: Cluster, name: str, number: int) -> Mapping[str, str]:
    """Returns completion index -> pod name, once all pods run."""
    index = r"{.metadata.labels.batch\.kubernetes\.io/job-completion-index}"
    form = f"jsonpath={{range .items[*]}}{index} {{.metadata.name}} {{.status.phase}};{{end}}"
    found: dict[str, str] = {}

    def running() -> bool:
        words = [
            line.split() for line in cluster.kubectl("get", "pods", "-l", f"job-name={name}", "-o", form).split(";")
        ]
        found.update({word[0]: word[1] for word in words if word[2:] == ["Running"]})
        return len(found) == number

    cluster.wait(f"pods of {name}", running)
    return found


def test_pods_of_a_job_become_ranks_with_the_gpus_of_the_kubelet(
    cluster: Cluster, kubelet: KubeletDouble, driver: Path, tmp_path: Path
) -> None:
    cluster.apply(job("llama", pods=2, gpus=1))
    pods = pods_of(cluster, "llama", 2)
    for index, name in pods.items():
        kubelet.hold("default", name, {"train": {"nvidia.com/gpu": [UUIDS[int(index) + 4]], "cpu": ["3"]}})
    jobs = collector(cluster, kubelet, driver, account(cluster, tmp_path, "reader", allowed=True))
    try:
        began = read_until(jobs, "job_start")
        assert began.entity == "job:default/llama"
        ranks = {f"rank:default/llama.{rank}": {"gpu": f"gpu:{NODE}.{rank + 4}"} for rank in range(2)}
        assert (began.data["ranks"], began.data["name"]) == (ranks, "llama")
        found = jobs.inventory()
        assert found["rank:default/llama.1"].parents == ("job:default/llama", f"gpu:{NODE}.5")
        facts = found["rank:default/llama.1"].attributes
        assert (facts["pod"], facts["namespace"], facts["scheduler"]) == (pods["1"], "default", "kubernetes")
        assert facts["labels"]["batch.kubernetes.io/job-name"] == "llama"
        cluster.kubectl("delete", "job", "llama", "--wait=true")
        for name in pods.values():
            kubelet.release("default", name)
        assert read_until(jobs, "job_end").data["ranks"] == sorted(ranks)
        assert not jobs.inventory()
    finally:
        jobs.close()


def test_without_the_right_to_list_pods_each_pod_is_a_job_and_one_line_is_logged(
    cluster: Cluster, kubelet: KubeletDouble, driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet.hold("vision", "resnet-0", {"train": {"nvidia.com/gpu": [UUIDS[0], UUIDS[1]]}})
    jobs = collector(cluster, kubelet, driver, account(cluster, tmp_path, "stranger", allowed=False))
    try:
        began = read_until(jobs, "job_start")
        jobs.read()
    finally:
        jobs.close()
    assert (began.entity, list(began.data["ranks"])) == ("job:vision/resnet-0", ["rank:vision/resnet-0.resnet-0"])
    assert jobs.inventory()["rank:vision/resnet-0.resnet-0"].parents[1:] == (f"gpu:{NODE}.0", f"gpu:{NODE}.1")
    log = capsys.readouterr().err
    assert log.count("status 403; the account needs the right to list pods") == 1
