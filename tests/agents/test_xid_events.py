"""XIDs through the real nvidia-ml-py over the driver library of nvml_stub.c."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.gpu.slots import boot_id
from pipeline.model.event_kinds import EVENT_KINDS
from tests.agents import nvml_stub

ROOT = Path(__file__).parents[2]
LOOKS = """
import json, sys
from agents.collector import NoData
from agents.collectors.gpu.xid import XidEvents
collector, found = XidEvents(wait=int(sys.argv[2])), []
try:
    collector.open("n1")
    for _ in range(int(sys.argv[1])):
        (reading,) = collector.read()
        found.append([[e.entity, e.kind, dict(e.data)] for e in reading.events])
    print(json.dumps({"looks": found}))
except NoData as absent:
    print(json.dumps({"looks": found, "no data": str(absent)}))
collector.close()
collector.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if nvml_stub.compiler() is None:
        pytest.skip("no C compiler: install one to test against a driver library")
    return nvml_stub.build(tmp_path_factory.mktemp("driver"))


def read_events(
    library: Path, tmp_path: Path, events: str, *settings: str, count: int = 1, wait: int = 0
) -> dict[str, Any]:
    """The collector's results in a separate process."""
    source = tmp_path / "events"
    os.mkfifo(source)  # a file would be read from its start by each new event set
    kept_open = os.open(source, os.O_RDWR)
    os.write(kept_open, events.encode())
    environ = nvml_stub.environment(library, settings, events=source, calls=tmp_path / "calls")
    command = [sys.executable, "-c", LOOKS, str(count), str(wait)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60)
    os.close(kept_open)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_an_xid_has_the_index_of_the_slots_file(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, reloaded after the first GPU was lost, numbers the second one 0."""
    ((_, _, data),) = read_events(library, tmp_path, "0 8 79\n", "gpus 2")["looks"][0]
    (tmp_path / "events").unlink()
    gpus = {"0000:00:01.0": {"index": 0}, f"{data['pci']}.0": {"index": 1}}
    (tmp_path / "gpus.json").write_text(json.dumps({"boot": boot_id(), "gpus": gpus}))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    found = read_events(library, tmp_path, "0 8 79\n1 8 79\n", "gpus 2")["looks"][0]
    assert [entity for entity, *_ in found] == ["gpu:n1.1", "gpu:n1.2"]


@pytest.mark.slow
def test_an_xid_is_an_event_of_its_gpu_with_its_meaning(library: Path, tmp_path: Path) -> None:
    found = read_events(library, tmp_path, "3 8 79\n0 8 94 5 1\n", "gpus 8")
    (first, second) = found["looks"][0]
    assert first[:2] == ["gpu:n1.3", "xid"]
    assert set(first[2]) <= set(EVENT_KINDS["xid"].data)
    assert first[2].pop("pci").count(":") == 2
    assert first[2] == {
        "xid": 79,
        "name": "GPU has fallen off the bus",
        "class": "pcie",
        "severity": "critical",
        "action": "reboot node",
        "then": "contact support",
        "source": "nvml",
        "count": 1,
    }
    assert (second[0], second[2]["detail"]) == ("gpu:n1.0", {"gpu_instance": 5, "compute_instance": 1})


def test_without_events_a_read_is_empty_and_short(library: Path, tmp_path: Path) -> None:
    assert read_events(library, tmp_path, "", "gpus 2", count=5, wait=1) == {"looks": [[]] * 5}


def test_a_lost_gpu_affects_no_other(library: Path, tmp_path: Path) -> None:
    """The driver ends the wait with `GPU is lost`; a new set of the others reads on."""
    found = read_events(library, tmp_path, "error 15\n1 8 48\n", "gpus 3", "lost 2", count=2)
    assert [[event[0] for event in look] for look in found["looks"]] == [[], ["gpu:n1.1"]]


def test_one_read_is_bounded_and_the_next_continues(library: Path, tmp_path: Path) -> None:
    found = read_events(library, tmp_path, "0 8 31\n" * 300, "gpus 1", count=2)
    assert [len(look) for look in found["looks"]] == [256, 44]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("init 9",), "no NVIDIA driver: "),
        (("gpus 0",), "none of 0 NVIDIA GPUs reports XIDs"),
        (("gpus 2", "fail nvmlEventSetCreate 999"), "returns no event set"),
        (("gpus 2", "fail nvmlDeviceRegisterEvents 3"), "none of 2 NVIDIA GPUs reports XIDs"),
        (("gpus 2", "fail nvmlDeviceGetCount 15"), "reports no number of GPUs"),
    ],
)
def test_a_driver_without_events_is_no_data_with_the_reason(
    library: Path, tmp_path: Path, settings: tuple[str, ...], reason: str
) -> None:
    assert reason in read_events(library, tmp_path, "", *settings)["no data"]
