"""docker-compose.yml agrees with code and documentation. `make compose-test` runs it with a real Docker Engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.commands.arguments import COMMANDS
from pipeline.config import sections

ROOT = Path(__file__).parents[1]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES = COMPOSE.partition("\nservices:\n")[2].partition("\nnetworks:\n")[0]
BLOCKS = dict(re.findall(r"^  ([a-z]+):(.*?)(?=^  [a-z]+:|\Z)", SERVICES, re.M | re.S))
"""Service -> its lines. Read as text: a YAML parser would be one more dependency for this file alone."""
TOOLS = ("alertmanager", "prometheus", "grafana")
"""Of the profile observability."""
OURS = [name for name, block in BLOCKS.items() if "<<: *fleetpulse" in block]


def settings(block: str) -> dict[str, str]:
    """Returns the variables of Fleetpulse in a part of the file, with Compose's variables at their defaults."""
    found = re.findall(r"^ +(FLEETPULSE__\w+): (?:\"(.*?)\"|(\S+))", block, re.M)
    return {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", quoted or plain) for name, quoted, plain in found}


def test_there_is_a_service_for_every_part() -> None:
    assert {"kafka", "init", "pipeline", "dashboard", "agent", "simulator", "readers", *TOOLS} == set(BLOCKS)
    assert sorted(OURS) == sorted(set(BLOCKS) - {"kafka", *TOOLS})


@pytest.mark.parametrize("service", OURS)
def test_every_variable_is_a_key_of_the_configuration(service: str) -> None:
    shared = COMPOSE.partition("\nx-settings:")[2].partition("\nservices:")[0]
    found = {**(settings(shared) if "*settings" in BLOCKS[service] else {}), **settings(BLOCKS[service])}
    assert found
    loaded = sections.load_config(environ=found)
    if service != "dashboard":
        assert loaded.pipeline.transport == "kafka"
        assert loaded.kafka.bootstrap_servers in re.findall(r"PLAINTEXT://(\S+?),", BLOCKS["kafka"])


@pytest.mark.parametrize("service", OURS)
def test_a_service_runs_an_existing_command(service: str) -> None:
    named = re.findall(r"^    command: \[(\w+)\]", BLOCKS[service], re.M) or re.findall(
        r"(?:exec|\|\|) fleetpulse (\w+)", BLOCKS[service]
    )
    assert named
    assert set(named) <= set(COMMANDS)


@pytest.mark.parametrize("service", BLOCKS)
def test_every_service_has_limits(service: str) -> None:
    shared = COMPOSE.partition("\nx-fleetpulse:")[2].partition("\nx-settings:")[0]
    block = BLOCKS[service] + (shared if service in OURS else "") + (BLOCKS[TOOLS[0]] if service in TOOLS else "")
    wanted = (
        "mem_limit",
        "cpus",
        "pids_limit",
        "read_only: true",
        "cap_drop: [ALL]",
        "no-new-privileges:true",
        "logging",
    )
    assert [word for word in (*wanted, "restart", "stop_grace_period") if word not in block] == []


def test_ports_are_published_on_loopback_only() -> None:
    ports = re.findall(r"^    ports: \[(.*)\]", COMPOSE, re.M)
    assert len(ports) == 2 + len(TOOLS)
    assert all(port.startswith('"127.0.0.1:') for port in ports)


def test_the_broker_is_the_release_used_by_the_tests() -> None:
    image = re.search(r"image: apache/kafka:(\S+)", COMPOSE)
    assert image is not None
    assert f"<version>{image[1]}</version>" in (ROOT / "tests/kafka_broker_pom.xml").read_text()


def test_the_image_runs_the_oldest_supported_python() -> None:
    (image,) = re.findall(r"^ARG BASE=python:(\S+)-slim", (ROOT / "deploy/images/Dockerfile").read_text(), re.M)
    assert f'requires-python = ">={image}"' in (ROOT / "pyproject.toml").read_text()


def test_tools_start_only_with_their_profile_and_the_pipelines_file_is_that_of_the_profile() -> None:
    """COMPOSE_PROFILES names both: the services, and the file with the Alertmanager."""
    assert all(
        "profiles: [observability]" in BLOCKS[name] or "<<: *tool" in BLOCKS[name] for name in (*TOOLS, "readers")
    )
    folder = ROOT / "deploy/compose"
    assert "./deploy/compose/${COMPOSE_PROFILES:-none}.toml:/etc/fleetpulse/fleetpulse.toml:ro" in BLOCKS["pipeline"]
    assert sections.load_config(folder / "none.toml", {}).notify.alertmanagers == ()
    (receiver,) = sections.load_config(folder / "observability.toml", {}).notify.alertmanagers
    assert receiver.urls == ("http://alertmanager:9093",)


def test_mounted_files_exist_and_their_jobs_are_those_of_the_guide() -> None:
    mounted = re.findall(r"(\./deploy/\S+?):/", COMPOSE.replace("${COMPOSE_PROFILES:-none}", "none"))
    assert len(mounted) == 6
    assert [path for path in mounted if not (ROOT / path).exists()] == []
    guide, ours = ((ROOT / p).read_text() for p in ("deploy/grafana/prometheus.yml", "deploy/compose/prometheus.yml"))
    fields = r"job_name: (\S+)|metrics_path: (\S+)|- '(\{.*\})'"
    assert re.findall(fields, ours) == re.findall(fields, guide)
