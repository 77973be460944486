"""Topology read from what the real systems accept and print: Slurm, Kubernetes, an InfiniBand fabric, lldpd."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from pipeline.topology.source import Naming, SourceTopology
from tests import kubernetes_cluster, slurm_cluster, slurm_rest
from tests.fabric import Plan, fabric
from tests.lldp_cable import cable
from tests.parts import do_without
from tests.pipeline.topology.conftest import read
from tests.until import until

pytestmark = pytest.mark.slow
TREE = """SwitchName=l1 Nodes=gpu[001-002],ghost003
SwitchName=l2 \\
    Nodes=ghost[004-008]
switchname=s1 switches=l[1-2]
"""
BLOCKS = "BlockName=b1 Nodes=gpu001\nBlockName=b2 Nodes=gpu002\nBlockSizes=1\n"
Lines = Mapping[str, tuple[str, ...]]


def lines_of(printed: str, expand: Callable[[str], Iterable[str]]) -> Lines:
    """Parents as `scontrol show topology` prints them; its own expansion of host lists."""
    found: dict[str, tuple[str, ...]] = {}
    levels = {name: int(level) for name, level in re.findall(r"SwitchName=(\S+) Level=(\d+)", printed)}
    kinds = {name: ("leaf", "spine", "core")[min(level, 2)] for name, level in levels.items()}
    for line in printed.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S+)", line))
        if "BlockName" in facts:
            over, kind, below = f"block:{facts['BlockName']}", "node", facts["Nodes"]
        elif levels[facts["SwitchName"]] == 0:
            over, kind, below = f"leaf:{facts['SwitchName']}", "node", facts["Nodes"]
        else:
            over = f"{kinds[facts['SwitchName']]}:{facts['SwitchName']}"
            kind, below = "", facts["Switches"]
        for name in expand(below):
            child = f"{kind or kinds[name]}:{name}"
            found[child] = (*found.get(child, ()), over)
    return found


def parents_of(found: SourceTopology) -> Lines:
    return {entity: above for entity, above in found.parents.items() if above}


@pytest.mark.slurm
def test_a_tree_is_read_as_slurm_22_05_reads_it(tmp_path: Path) -> None:
    if lacking := slurm_cluster.missing():
        do_without("slurm", lacking)
    with slurm_cluster.Cluster(tmp_path / "lab", topology=TREE) as slurm:
        printed = slurm.run("scontrol", "show", "topology")
        shown = lines_of(printed, lambda text: slurm.run("scontrol", "show", "hostnames", text).split())
    assert shown["node:gpu002"] == ("leaf:l1",)
    assert parents_of(read("slurm", TREE)) == shown


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("plugin", "text"), [("tree", "SwitchName=l1 Nodes=gpu001,gpu002\nSwitchName=s1 Switches=l1\n"), ("block", BLOCKS)]
)
def test_trees_and_blocks_are_read_as_slurm_24_11_reads_them(plugin: str, text: str) -> None:
    if lacking := slurm_rest.missing():
        do_without("slurm", lacking)
    with slurm_rest.RestCluster(text, plugin) as slurm:
        printed = slurm.run("scontrol", "show", "topology")
        shown = lines_of(printed, lambda part: slurm.run("scontrol", "show", "hostnames", part).split())
    assert {"node:gpu001", "node:gpu002"} <= shown.keys()
    assert parents_of(read("slurm", text)) == shown


@pytest.mark.kubernetes
def test_labels_of_nodes_are_read_as_a_real_api_server_returns_them(tmp_path: Path) -> None:
    if lacking := kubernetes_cluster.missing():
        do_without("kubernetes", lacking)
    topograph = {f"network.topology.nvidia.com/{name}": f"{name}-1" for name in ("accelerator", "block", "spine")}
    zone = {"topology.kubernetes.io/zone": "z1", "topology.kubernetes.io/region": "eu", "example.com/row": "a"}
    clique = {"nvidia.com/gpu.clique": "7b6c5c8f-2d4e-4b1a-9c1f-0f1e2d3c4b5a.3"}
    labels = {"n1.example.org": {**topograph, **zone, **clique}, "n2.example.org": {**topograph, **zone}, "n3": {}}
    with kubernetes_cluster.Cluster(tmp_path / "k8s", kwok=False) as cluster:
        for name, own in labels.items():
            cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": own}})
        listed = cluster.kubectl("get", "nodes", "-o", "json")
        raw = cluster.kubectl("get", "--raw", "/api/v1/nodes")
    naming = Naming(labels={"example.com/row": "row"}, short_names=True)
    found = read("kubernetes", listed, naming)
    fabric_ = ("accelerator:accelerator-1", "block:block-1", "spine:spine-1", "zone:z1", "region:eu")
    assert found.parents["node:n1"] == ("row:a", "clique:7b6c5c8f-2d4e-4b1a-9c1f-0f1e2d3c4b5a.3", *fabric_)
    assert found.parents["node:n2"] == ("row:a", *fabric_)
    assert found.parents["node:n3"] == ()
    assert found.parents["accelerator:accelerator-1"] == ("block:block-1",)
    assert found.parents["zone:z1"] == ("region:eu",)
    items = {
        "items": [{"metadata": row["metadata"]} for row in json.loads(listed)["items"]]
    }  # as jq of the page makes it
    assert (
        read("kubernetes", raw, naming).parents
        == read("kubernetes", json.dumps(items), naming).parents
        == found.parents
    )


@pytest.mark.infiniband
def test_a_simulated_fabric_is_read_from_what_the_real_ibnetdiscover_prints(tmp_path: Path) -> None:
    plan = Plan()
    with fabric(tmp_path, plan) as running:
        printed = running.await_tool("ibnetdiscover", (), lambda text: text.count("\nCa\t") == plan.leaves * plan.hosts)
        grouped = running.ask("ibnetdiscover", "--full")
        running.unlink(2, 3)
        without = running.await_tool("ibnetdiscover", (), lambda text: "n203" not in text)
    found = read("ibnetdiscover", printed)
    leaves = {f"leaf:leaf{n}": ("spine:spine1", "spine:spine2") for n in (1, 2)}
    hosts = {f"port:n{n}{h:02d}.mlx5_0": (f"node:n{n}{h:02d}", f"leaf:leaf{n}") for n in (1, 2) for h in range(1, 9)}
    assert {entity: set(found.parents[entity]) for entity in leaves} == {e: set(above) for e, above in leaves.items()}
    assert {entity: found.parents[entity] for entity in hosts} == hosts
    assert len(found.links) == len(hosts) + plan.leaves * plan.spines
    assert found.open_ends == found.remarks == []
    assert read("ibnetdiscover", grouped).parents == found.parents
    assert found.parents.keys() - read("ibnetdiscover", without).parents.keys() >= {"port:n203.mlx5_0"}


@pytest.mark.lldp
def test_the_neighbors_of_a_real_lldpd_are_read_in_both_of_its_formats() -> None:
    def shown(socket: str, form: str) -> str:
        command = ["/usr/sbin/lldpcli", "-u", socket, "-f", form, "show", "neighbors"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout

    with cable() as (socket, _, configure):

        def told_again() -> str:
            """An lldpd that does not know its port yet forgets what it receives about it."""
            configure(1, "lldp", "portidsubtype", "local", "Ethernet9")
            return shown(socket, "json")

        def captured() -> list[str]:
            until(lambda: "leaf-real" in (text := told_again()) and "Ethernet9" in text, 60)
            return [shown(socket, form) for form in ("json", "json0")]

        hosts = captured()  # a Linux host: Station is enabled, Bridge and Router are not
        configure(1, "system", "capabilities", "enabled", "bridge,router")
        until(lambda: read("lldp", shown(socket, "json"), path="neighbors/n042.json").parents, 60)
        texts = captured()
    for text in hosts:
        found = read("lldp", text, path="neighbors/n042.json")
        assert (found.parents, found.links) == ({}, [])
        assert found.remarks == ["n042 host0: neighbor 'leaf-real' left out: neither bridge nor router"]
    for text in texts:
        found = read("lldp", text, path="neighbors/n042.json")
        assert found.parents["port:n042.host0"] == ("node:n042", "leaf:leaf-real")
        assert found.parents["port:leaf-real.Ethernet9"] == ("leaf:leaf-real",)
