"""The pods of the Helm chart as containers of the engine, with what a kubelet gives them; no control plane is needed.

Users, capabilities, limits, variables and probes are those of the rendered chart. A volume with fsGroup is root's with
mode 2775, a file of a Secret 0440, as a kubelet makes them. Without Helm it is left out, and that is printed.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from stack import CheckError, Stack, run_command, wait_for

NETWORK, LABEL = "fleetpulse-chart-test", "fleetpulse-chart-test=1"
VALUES = (
    *("image.tag=local", "image.repository=fleetpulse", "kafka.bootstrapServers=kafka:19092"),
    *("agent.image.tag=local", "agent.image.repository=fleetpulse-agent", "agent.kafka.bootstrapServers=kafka:19092"),
)
PROBE_S, BROKER_S, GATE = 300, 120, "300s"
"""Limits. Chosen: on two busy cores detectors are compiled after 1 to 2 minutes."""
PIPELINE, DASHBOARD, AGENT = "fleetpulse-pipeline", "fleetpulse-dashboard", "fleetpulse-agent"
MEMORY = {"Mi": "m", "Gi": "g"}
Report = Callable[[str, Callable[[], str]], bool]


def check_chart(stack: Stack, report: Report) -> None:
    """Runs the checks of the chart in order, and removes what they made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse"
    program = shutil.which("helm") or next(map(str, sorted(cache.glob("helm/*/helm"))), None)
    if program is None:
        print("     no helm: the chart is left out (make parts PARTS=helm)")
        return
    stack.compose("stop")  # memory and cores are for the pods
    try:
        pods = Pods(program)
        report("chart: the job makes the topics", lambda: pods.run_job(stack))
        if report("chart: all pods start, without a right", pods.start):
            report("chart: probes of all pods pass", pods.probe_all)
            report("chart: the gate passes in the pipeline's pod", pods.pass_gate)
            report("chart: a new pod of the pipeline has the rows of the old one", pods.replace_pipeline)
    finally:
        remove_all()


class Pods:
    """Containers named as the objects that the chart has for them."""

    def __init__(self, helm: str) -> None:
        words = [helm, "template", "fleetpulse", "deploy/helm/fleetpulse", "--namespace", "fleetpulse"]
        text = run_command(*words, *(word for value in VALUES for word in ("--set", value)))
        self._objects = [found for found in yaml.safe_load_all(text) if found]

    def run_job(self, stack: Stack) -> str:
        """Starts a broker of its own, with the settings of the stack's, and runs the chart's job to its end."""
        run_command("docker", "network", "create", "--label", LABEL, NETWORK)
        config = stack.inspect("kafka")["Config"]
        settings = [*config["Env"], "KAFKA_LOG_DIRS=/tmp/kafka"]
        words = ["run", "--detach", "--label", LABEL, "--name", "kafka", "--network", NETWORK]
        run_command("docker", *words, *(w for one in settings for w in ("--env", one)), config["Image"])
        asked = ("/opt/kafka/bin/kafka-broker-api-versions.sh", "--bootstrap-server", "localhost:9092")
        wait_for(BROKER_S, "a broker", lambda: succeeds("docker", "exec", "kafka", *asked) or None)
        name = self._run(self._find("Job"))
        code = run_command("docker", "wait", name).strip()
        said = subprocess.run(
            ["docker", "logs", name], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ).stdout
        made = re.findall(r"^topic (\S+): created", said, re.MULTILINE)
        if code != "0" or not made:
            raise CheckError(f"exit {code}: {said[-500:]}")
        return ", ".join(made)

    def start(self) -> str:
        """Starts the pods of agent, pipeline and dashboard. Raises CheckError for one with a capability."""
        seen = []
        for name in (PIPELINE, DASHBOARD, AGENT):
            self._run(self._find(name))
            status = run_command("docker", "exec", name, "cat", "/proc/self/status")
            found = dict(re.findall(r"^(CapEff|NoNewPrivs|Seccomp|Uid):\s+(\S+)", status, re.MULTILINE))
            if int(found["CapEff"], 16) or found["NoNewPrivs"] != "1" or found["Seccomp"] != "2":
                raise CheckError(f"{name}: {found}")
            seen.append(f"{name} user {found['Uid']}")
        return ", ".join(seen)

    def probe_all(self) -> str:
        """Waits until each probe of each container passes."""
        seen = []
        for name in (PIPELINE, DASHBOARD, AGENT):
            container = pod_of(self._find(name))["containers"][0]
            for kind in [key for key in container if key.endswith("Probe")]:
                asked = functools.partial(passes, name, container, kind)
                _, took = wait_for(PROBE_S, f"{kind} of {name}", lambda asked=asked: asked() or None)  # type: ignore[misc]
                seen.append(f"{name} {kind} {took:.0f} s")
        return ", ".join(seen)

    def pass_gate(self) -> str:
        """Runs the gate of docs/install.md. Raises CheckError with what fails."""
        began = time.monotonic()
        words = ("docker", "exec", PIPELINE, "fleetpulse", "doctor", "--wait", GATE, "--output", "json")
        done = subprocess.run(words, capture_output=True, text=True)
        lines = json.loads(done.stdout or "[]")
        open_files = [line for line in lines if line["check"] in ("permissions", "secrets") and line["state"] != "ok"]
        if done.returncode or open_files:
            wrong = open_files or [line for line in lines if line["state"] == "fail"]
            raise CheckError("; ".join(f"{line['check']}: {line['found']}" for line in wrong) or done.stderr[-500:])
        return f"after {time.monotonic() - began:.0f} s"

    def replace_pipeline(self) -> str:
        """Stops the pod as an upgrade does, and starts another one with its volume.

        Telemetry proves nothing, as Kafka gives it back: compared is what the store alone has, a mute and the audit.
        """
        before, _ = wait_for(PROBE_S, "rows of the agent's node", lambda: count_rows() or None)
        words = ("mutes", "add", "straggler", "node:node-1", "--hours", "1", "--reason", "chart test")
        mute = json.loads(run_command("docker", "exec", PIPELINE, "fleetpulse", *words, "--output", "jsonl"))["id"]
        kept = read_audit()
        if not any(mute in line for line in kept):
            raise CheckError(f"mute {mute}: the audit has no row of it: {kept[-3:]}")
        grace = pod_of(self._find(PIPELINE))["terminationGracePeriodSeconds"]
        run_command("docker", "stop", "--time", str(grace), PIPELINE)
        code = run_command("docker", "inspect", "--format", "{{.State.ExitCode}}", PIPELINE).strip()
        run_command("docker", "rm", PIPELINE)
        self._run(self._find(PIPELINE))
        after, _ = wait_for(PROBE_S, "rows as before", lambda: n if (n := count_rows()) >= before else None)
        if code != "0":
            raise CheckError(f"the old pod ended with {code}")
        lost = sorted(set(kept) - set(read_audit()))
        mutes = run_command("docker", "exec", PIPELINE, "fleetpulse", "mutes", "--output", "jsonl")
        if lost or mute not in mutes:
            raise CheckError(f"the new pod lost {len(lost)} rows of the audit of {len(kept)}, mutes: {mutes or 'none'}")
        return f"{before} rows, then {after}; mute and {len(kept)} rows of the audit are there"

    def _find(self, what: str) -> Any:
        kinds = ("StatefulSet", "Deployment", "DaemonSet", "Job")
        fitting = [one for one in self._objects if what in (one["kind"], one["metadata"]["name"])]
        return next(one for one in fitting if one["kind"] in kinds)

    def _run(self, found: Any) -> str:
        """Starts the pod of an object and returns the name of its container."""
        pod, name = pod_of(found), str(found["metadata"]["name"])
        (container,) = pod["containers"]
        image = container["image"]
        words = ["--label", LABEL, "--name", name, *rights(pod, container), *reach(pod, name)]
        values = [f"{one['name']}={one.get('value', 'node-1')}" for one in container["env"]]
        values.append("KUBERNETES_SERVICE_HOST=10.96.0.1")
        words += [word for value in values for word in ("--env", value)]
        volumes = {one["name"]: one for one in pod["volumes"]}
        for mount in container["volumeMounts"]:
            words += self._mount(image, pod, volumes.get(mount["name"], {}), mount, name)
        run_command("docker", "run", "--detach", *words, image, *container["args"])
        return name

    def _mount(self, image: str, pod: Any, volume: Any, mount: Any, owner: str) -> Iterator[str]:
        group, place = pod["securityContext"].get("fsGroup", 0), mount["mountPath"]
        host = volume.get("hostPath", {})
        if host.get("type") == "File":
            return iter(("--volume", f"{host['path']}:{place}:ro"))
        if "emptyDir" in volume:
            return iter(("--tmpfs", f"{place}:exec,nosuid,nodev,mode=2777,gid={group}"))
        name = f"{NETWORK}-{owner}-{mount['name']}"
        files = self._files(volume)
        if not succeeds("docker", "volume", "inspect", name):
            run_command("docker", "volume", "create", "--label", LABEL, name)
            mode = "0755" if files is not None or host else "2775"
            fill(image, name, group, mode, files or {}, "0440" if "secret" in volume else "0644")
        return iter(("--volume", f"{name}:{os.path.dirname(place) if 'subPath' in mount else place}:nocopy"))

    def _files(self, volume: Any) -> dict[str, str] | None:
        """Returns name -> content of a ConfigMap's or Secret's files; None for a volume of another kind."""
        name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        if name is None:
            return None
        kind = "ConfigMap" if "configMap" in volume else "Secret"
        found = next(one for one in self._objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
        if kind == "ConfigMap":
            return dict(found["data"])
        encoded = {key: base64.b64decode(text).decode() for key, text in found.get("data", {}).items()}
        return {**encoded, **found.get("stringData", {})}


def pod_of(found: Any) -> Any:
    """Returns the pod's specification of an object."""
    return found["spec"]["template"]["spec"]


def rights(pod: Any, container: Any) -> list[str]:
    """Returns the words of `docker run` for user, rights and memory."""
    context = {**pod["securityContext"], **container["securityContext"]}
    words = ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
    words += ["--group-add", str(context["fsGroup"])] if "fsGroup" in context else []
    words += ["--read-only"] if context["readOnlyRootFilesystem"] else []
    words += [] if context["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
    words += [word for one in context["capabilities"].get("drop", []) for word in ("--cap-drop", one)]
    words += [word for one in context["capabilities"].get("add", []) for word in ("--cap-add", one)]
    limit = container["resources"]["limits"]["memory"]
    return [*words, "--memory", limit[:-2] + MEMORY[limit[-2:]]]


def reach(pod: Any, name: str) -> list[str]:
    """Returns the words of `docker run` for network and processes."""
    words = ["--pid", "host"] if pod.get("hostPID") else []
    if not pod.get("hostNetwork"):
        return [*words, "--network", NETWORK, "--network-alias", name]
    return [*words, "--network", "host", "--add-host", f"kafka:{address('kafka')}"]


def address(name: str) -> str:
    """Returns the address of a container in the network of the pods."""
    found = json.loads(run_command("docker", "inspect", name))[0]
    return str(found["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])


def fill(image: str, volume: str, group: int, mode: str, files: dict[str, str], file_mode: str) -> None:
    """Writes files into a volume; they and its folder are root's and the group's."""
    line = f"cd /v && chown 0:{group} . && chmod {mode} ."
    for name, text in files.items():
        coded = base64.b64encode(text.encode()).decode()
        line += f" && echo {coded} | base64 -d > {name} && chgrp {group} {name} && chmod {file_mode} {name}"
    words = ("--user", "0:0", "--network", "none", "--entrypoint", "sh", "--volume", f"{volume}:/v")
    run_command("docker", "run", "--rm", *words, image, "-c", line)


def passes(name: str, container: Any, kind: str) -> bool:
    """Returns whether a probe passes; HTTP is asked from where this runs, as from a node."""
    probe = container[kind]
    if "exec" in probe:
        return succeeds("docker", "exec", name, *probe["exec"]["command"])
    asked = probe["httpGet"]
    port = next(one["containerPort"] for one in container["ports"] if one["name"] == asked["port"])
    headers = {one["name"]: one["value"] for one in asked.get("httpHeaders", [])}
    request = urllib.request.Request(f"http://{address(name)}:{port}{asked['path']}", headers=headers)
    try:
        urllib.request.urlopen(request, timeout=probe.get("timeoutSeconds", 1)).close()
    except OSError:
        return False
    return True


def succeeds(*words: str) -> bool:
    """Returns whether a command ends with 0."""
    return subprocess.run(words, capture_output=True).returncode == 0


def read_audit() -> list[str]:
    """Returns the rows of the audit in the pipeline's pod, each as JSON."""
    query = "SELECT number, action, target, after, hash FROM audit ORDER BY number"
    return run_command("docker", "exec", PIPELINE, "fleetpulse", "sql", query, "--output", "jsonl").splitlines()


def count_rows() -> int:
    """Returns the rows of nodes that the pipeline's pod has; 0 while it does not answer."""
    query = ("fleetpulse", "sql", "SELECT count(*) AS n FROM node", "--output", "jsonl")
    done = subprocess.run(["docker", "exec", PIPELINE, *query], capture_output=True, text=True)
    return int(json.loads(done.stdout)["n"]) if done.returncode == 0 and done.stdout else 0


def remove_all() -> None:
    """Removes containers, volumes and network."""
    mine = ("--quiet", "--filter", f"label={LABEL}")
    for listed, removed in (
        (("ps", "--all"), ("rm", "--force", "--volumes")),
        (("volume", "ls"), ("volume", "rm")),
        (("network", "ls"), ("network", "rm")),
    ):
        if found := run_command("docker", *listed, *mine).split():
            run_command("docker", *removed, *found)
