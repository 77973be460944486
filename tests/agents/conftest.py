"""Shared by the tests of the agent: reading a spool to its end as the pipeline does, a scenario for the simulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.model.errors import GapError
from pipeline.transport import Message
from pipeline.transport.spool import SpoolTransport
from tests.agents import nvml_stub
from tests.agents.nvml_machine import Machine
from tests.parts import do_without

Drained = tuple[list[Message], list[tuple[int, int, str]]]


@pytest.fixture
def drain() -> Callable[[Path], Drained]:
    """Reads every partition below a folder from its first offset to its end: (messages, gaps)."""

    def run(directory: Path) -> Drained:
        transport, messages, gaps = SpoolTransport(directory), [], []
        for partition in transport.partitions():
            offset, end = transport.bounds(partition)
            while offset < end:
                try:
                    found = transport.read(partition, offset, 100, 1 << 20)
                except GapError as gap:
                    gaps.append((gap.first, gap.next_offset, gap.cause))
                    if not gap.first == offset < gap.next_offset <= end:
                        raise
                    offset = gap.next_offset
                    continue
                assert [m.offset for m in found] == list(range(offset, offset + len(found)))
                messages += found
                offset += len(found)
        transport.close()
        return messages, gaps

    return run


@pytest.fixture
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path of a scenario file with TEXT of the test module."""
    path = tmp_path / "scenario.toml"
    path.write_text(request.module.TEXT)
    return str(path)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for the NVIDIA driver's library."""
    if nvml_stub.compiler() is None:
        pytest.skip("no C compiler: install gcc to test against a driver library")
    return nvml_stub.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def machine(nvml_library: Path, tmp_path: Path) -> Machine:
    """A machine of stub GPUs."""
    return Machine(nvml_library, tmp_path)


HAS_TORCH = "import sys; from importlib.util import find_spec as f; sys.exit(not (f('torch') and f('numpy')))"


@pytest.fixture(scope="session")
def torch_python() -> str:
    """A Python that has PyTorch, on a CPU at least: ours, or that of the distribution."""
    pythons = (python for python in (sys.executable, "/usr/bin/python3") if Path(python).exists())
    found = next((p for p in pythons if subprocess.run([p, "-c", HAS_TORCH]).returncode == 0), None)
    if found is None:
        do_without("torch", "no PyTorch here: run 'make parts', or pip install 'fleetpulse[torch]'")
    return found
