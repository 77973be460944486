"""Backup and restore on Kubernetes as docs/backup.md has them: its own lines are run against a real control plane.

No kubelet runs a pod here, so what the lines execute in a pod is executed on this machine, with the pod's environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands.arguments import build_parser
from pipeline.store.database import Database
from tests import kubernetes_build
from tests.kubernetes_cluster import Cluster, ClusterError, missing
from tests.parts import do_without
from tests.test_kubernetes_deployment import helm
from tests.test_kubernetes_site import CHART, LEAST, of_kind

ROOT = Path(__file__).parents[1]
RESTORE = ROOT / "deploy" / "kubernetes" / "restore.yaml"
SECTION = (ROOT / "docs" / "backup.md").read_text().partition("## On Kubernetes\n")[2].partition("\n## ")[0]
BACK_UP, BRING_BACK = (
    re.sub(r"(?m)^    ", "", block) for block in re.findall(r"(?m)(?:^    .+\n)+", SECTION) if "kubectl" in block
)
VALUES = {**LEAST, "agent": {"enabled": False}}
STATE = "/var/lib/fleetpulse"
NAME = "fleetpulse-2026-11-26"


def render() -> list[dict[str, Any]]:
    done = helm("template", "fleetpulse", str(CHART), "--namespace", "fleetpulse", values=VALUES)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@pytest.mark.helm
def test_the_restoring_pod_has_volume_store_and_rights_of_the_pipelines_pod() -> None:
    (stateful,) = of_kind(render(), "StatefulSet")
    name, pod = stateful["metadata"]["name"], stateful["spec"]["template"]["spec"]
    ours = yaml.safe_load(RESTORE.read_text())["spec"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in ours["volumes"] if "emptyDir" not in volume]
    (template,) = stateful["spec"]["volumeClaimTemplates"]
    assert claims == [f"{template['metadata']['name']}-{name}-0"]
    (theirs,), (container,) = pod["containers"], ours["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in theirs["volumeMounts"]}
    assert {m["name"]: m["mountPath"] for m in container["volumeMounts"]} == {n: mounts[n] for n in ("state", "tmp")}
    assert all(variable in theirs["env"] for variable in container["env"])
    assert ours["securityContext"] == pod["securityContext"]
    assert container["securityContext"] == theirs["securityContext"]
    used = re.findall(r"(?:exec|pod/|statefulset )(?:-i )?\s*(fleetpulse-\S+)(?: -c (\S+))?", BACK_UP + BRING_BACK)
    known = {(f"{name}-0", theirs["name"]), (f"{name}-0", ""), (name, ""), ("fleetpulse-restore", "")}
    assert {(one, inside) for one, inside in used} == known


def test_every_command_in_a_pod_is_one_of_the_program_on_the_volume() -> None:
    found = re.findall(r"-- fleetpulse (.+)", BACK_UP + BRING_BACK)
    parsed = [build_parser().parse_args(shlex.split(words)) for words in found]
    assert [one.command for one in parsed] == ["backup", "restore"]
    assert {p.rpartition("/")[0] for p in re.findall(rf"{STATE}/\S+/\$name", SECTION)} == {f"{STATE}/backups"}


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_that_differs_from_its_checksums_leaves_the_backup_on_the_volume(tmp_path: Path, whole: bool) -> None:
    """A shell at a terminal goes on after a line that failed."""
    folder, log = tmp_path / NAME, tmp_path / "log"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    sums = "sha256sum manifest.json > SHA256SUMS" + ("" if whole else "; echo more >> manifest.json")
    subprocess.run(["sh", "-c", f"{sums}; cd ..; tar -cf {NAME}.tar {NAME}"], cwd=folder, check=True)
    lines = f"kubectl() {{ echo $* >> {log}; }}\nname={NAME}\n" + BACK_UP[BACK_UP.index("tar -xf") :]
    subprocess.run(["bash", "-c", lines], cwd=tmp_path, capture_output=True)
    assert (log.read_text() if log.exists() else "").count(f"rm -r {STATE}/backups/{NAME}") == whole


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if lacking := missing():
        do_without("kubernetes", lacking)
    try:
        with Cluster(tmp_path / "kubernetes") as found:
            labels = {"pod-security.kubernetes.io/enforce": "restricted"}
            found.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "fleetpulse", "labels": labels}})
            found.node("cpu001", {})
            volume = {"capacity": {"storage": "1Ti"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/srv"}}
            found.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "d"}, "spec": volume})
            yield found
    except ClusterError as error:
        do_without("kubernetes", str(error))


@pytest.fixture
def environ(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """An environment with `kubectl`, of which `exec` runs on this machine, with a folder as the volume."""
    programs, volume = tmp_path / "programs", tmp_path / "volume"
    programs.mkdir()
    volume.mkdir()
    scripts = {
        "kubectl": f"""
            case " $* " in *" exec "*)
                pod=$(printf '%s\\n' "$@" | sed '1,/^exec$/d' | grep -m 1 '^fleetpulse-')
                phase=$({kubernetes_build.parts()} kubectl -n fleetpulse get pod "$pod" -o 'jsonpath={{.status.phase}}')
                [ "$phase" = Running ] || {{ echo "pod $pod: found '$phase'; expected Running" >&2; exit 1; }}
                while [ "$1" != -- ]; do shift; done; shift
                for word; do shift; set -- "$@" "$(printf %s "$word" | sed 's#^{STATE}#{volume}#')"; done
                exec "$@" ;;
            esac
            exec {kubernetes_build.parts()} kubectl "$@"
            """,
        "fleetpulse": f'exec {sys.executable} {ROOT}/fleetpulse.py "$@"\n',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    more = {"FLEETPULSE__STORE__PATH": f"{volume}/store.duckdb", "FLEETPULSE__STORE__FREE_BYTES": "0"}
    more |= {"FLEETPULSE__API__PORT": "1", "FLEETPULSE__PIPELINE__TRANSPORT": "kafka"}
    return {**os.environ, **more, "KUBECONFIG": str(cluster.kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}


def write_store(path: Path, mark: str) -> None:
    opened = Database(path)
    opened.connection.execute("INSERT INTO meta VALUES ('drill', ?)", [mark])
    opened.close()


def read_store(path: Path) -> list[tuple[str]]:
    opened = Database(path)
    try:
        return opened.connection.execute("SELECT value FROM meta WHERE key = 'drill'").fetchall()
    finally:
        opened.close()


@pytest.mark.kubernetes
@pytest.mark.helm
@pytest.mark.slow
def test_the_lines_of_the_guide_bring_a_lost_store_back(
    cluster: Cluster, environ: dict[str, str], tmp_path: Path
) -> None:
    reach = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", "fleetpulse", "--no-hooks")
    done = helm("install", "fleetpulse", str(CHART), *reach, values={**VALUES, "image": {"tag": "9.9"}})
    assert done.returncode == 0, done.stderr

    def phase(pod: str) -> str:
        form = "jsonpath={.status.phase}"
        return cluster.kubectl("get", "pod", pod, "-n", "fleetpulse", "--ignore-not-found", "-o", form)

    def run(lines: str) -> str:
        words = ["bash", "-euo", "pipefail", "-c", lines]
        ran = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    store = tmp_path / "volume" / "store.duckdb"
    cluster.wait("the pipeline", lambda: phase("fleetpulse-pipeline-0") == "Running")
    write_store(store, "before")
    run(BACK_UP)
    assert list((tmp_path / "volume" / "backups").iterdir()) == []
    shutil.rmtree(tmp_path / NAME)  # the unpacked copy: the restore needs the archive alone
    store.unlink()
    write_store(store, "a new volume")
    middle = "kubectl -n fleetpulse get pod fleetpulse-restore -o json > pod.json\n"
    out = run(BRING_BACK.replace("kubectl -n fleetpulse delete pod", f"{middle}kubectl -n fleetpulse delete pod"))
    assert "scaled" in out
    restored = json.loads((tmp_path / "pod.json").read_text())
    assert restored["spec"]["containers"][0]["image"] == "fleetpulse:9.9"
    assert read_store(store) == [("before",)]
    assert (tmp_path / "volume" / "store.duckdb.replaced").is_dir()
    cluster.wait("the pipeline", lambda: phase("fleetpulse-pipeline-0") == "Running")
    assert phase("fleetpulse-restore") == ""
