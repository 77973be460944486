"""The GPU canary: runs only on idle GPUs, yields to jobs, and PyTorch gives the known answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collectors.canary import gpu_problems
from agents.collectors.canary.arithmetic import digest_array
from agents.collectors.canary.gpu_problems import PROBLEMS, VOTED_PROBLEMS, right_answer
from agents.collectors.canary.known_answers import load_known_answers
from tests.agents import nvml_stub

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("gpu_worker_program.py")
PATIENCE_S = 60.0
FREE = ("set nvmlDeviceGetComputeRunningProcesses_v3 0", "set nvmlDeviceGetUtilizationRates 0")
UNUSED = (*FREE, "set nvmlDeviceGetMemoryInfo 600000000", "gpus 3")
ATTEND = (
    "import sys; from pathlib import Path; from agents.collectors.canary import gpu_program as gpu;"
    "work = lambda g, words: [sys.executable, sys.argv[1], words[1], sys.argv[2]];"
    "sys.exit(gpu.main(['--idle', sys.argv[3], '--seconds', '0.2'], work, Path(sys.argv[4])))"
)


class GpuProgram:
    """The GPU program on a machine of stub GPUs, whose state the test changes."""

    def __init__(self, library: Path, folder: Path, stays: float, idle: float, *settings: str) -> None:
        self.control = folder / "control"
        nvml_stub.write_control(self.control, *settings)
        self.calls = folder / "calls"
        paths = {"control": self.control, "calls": self.calls}
        environ = nvml_stub.environment(library, (), **paths) | {"PYTHONPATH": str(ROOT)}
        no_gpu_of_this_machine = str(folder / "pci")
        words = [sys.executable, "-c", ATTEND, str(WORKER), str(stays), str(idle), no_gpu_of_this_machine]
        self.process = subprocess.Popen(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def wait_for_poll(self) -> None:
        """Waits until the program has polled the first GPU once more."""
        before, until = self._count_polls(), time.monotonic() + PATIENCE_S
        while self._count_polls() == before:
            assert time.monotonic() < until
            time.sleep(0.01)

    def _count_polls(self) -> int:
        calls = nvml_stub.calls_made(self.calls)
        return sum(name == "nvmlDeviceGetUtilizationRates" and gpu == 0 for name, gpu, _ in calls)

    def rest(self) -> list[dict[str, Any]]:
        message, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return [json.loads(line) for line in message.splitlines()]


# --- idle GPUs --------------------------------------------------------------------------------------------------------


def test_each_idle_gpu_gets_a_worker_that_sees_only_this_gpu(nvml_library: Path, tmp_path: Path) -> None:
    found = GpuProgram(nvml_library, tmp_path, 0, 0.1, *UNUSED).rest()
    results = [line for line in found if "digest" in line]
    assert [line["device"] for line in results] == ["0", "1", "2"]
    assert all(line["digest"] == line["expected"] == line["uuid"] for line in results)


@pytest.mark.slow
def test_gpus_in_use_or_needed_by_a_job_get_no_worker(nvml_library: Path, tmp_path: Path) -> None:
    settings = (
        "set nvmlDeviceGetComputeRunningProcesses_v3 1 1",
        "set nvmlDeviceGetUtilizationRates 3 2",
        "set nvmlDeviceGetMemoryInfo 5000000000 3",
        "set nvmlDeviceGetComputeMode 3 4",
        "mig 5",
        "fail nvmlDeviceGetComputeRunningProcesses_v3 999 6",
        "lost 7",
    )
    found = GpuProgram(nvml_library, tmp_path, 0, 0, *UNUSED, "gpus 9", *settings).rest()
    assert {line["device"] for line in found} == {"0", "8"}


@pytest.mark.slow
def test_a_gpu_used_during_the_watch_is_not_idle(nvml_library: Path, tmp_path: Path) -> None:
    watching = GpuProgram(nvml_library, tmp_path, 0, 3.0, *UNUSED)
    watching.wait_for_poll()
    nvml_stub.write_control(watching.control, *UNUSED, "set nvmlDeviceGetUtilizationRates 50 0")
    watching.wait_for_poll()
    nvml_stub.write_control(watching.control, *UNUSED)
    assert {line["device"] for line in watching.rest()} == {"1", "2"}


@pytest.mark.slow
def test_a_new_job_ends_the_worker_immediately_and_its_result_is_dropped(nvml_library: Path, tmp_path: Path) -> None:
    watching = GpuProgram(nvml_library, tmp_path, 60, 0, *UNUSED, "gpus 1")
    assert watching.line()["begin"]
    pid = watching.line()["pid"]
    came = time.monotonic()
    nvml_stub.write_control(watching.control, *UNUSED, "gpus 1", "set nvmlDeviceGetComputeRunningProcesses_v3 1")
    (last,) = watching.rest()
    assert last == {"device": "0", "yielded": True}
    assert time.monotonic() - came < PATIENCE_S / 2  # 0.1 s plus load; the worker would run 60 s
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_a_driver_it_reports_that_and_ends(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)}
    words = [sys.executable, "-m", "agents.collectors.canary.gpu_program", "--idle", "0"]
    ran = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    assert ran.returncode == 3
    assert "absent" in json.loads(ran.stdout)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemm-f8-down5", "alu-scatter"])
def test_shipped_gpu_answers_are_computed_without_a_gpu(name: str) -> None:
    problem = next(p for p in PROBLEMS if p.name == name)
    assert right_answer(problem, 2) == load_known_answers()[gpu_problems.VERSION][problem.instance(2)]


SMALL = {"gemm": {"size": 64}, "alu": {"size": 4096}, "march": {}, "special": {"size": 4096}}
ASK = """
import json, sys
from agents.collectors.canary.problems import Problem
from agents.collectors.canary.gpu_worker import TorchDevice
def flip(stage, values):
    if stage in stages:
        flat = values.view(-1)
        flat[5] = -1 - flat[5]
stages, problems = json.load(sys.stdin)
import torch
on_gpu = torch.cuda.is_available()
device = TorchDevice("cuda:0" if on_gpu else "cpu", memory=0.01, disturb=flip)
exact_roots = on_gpu or not torch.backends.mkl.is_available()  # MKL rounds some roots the other way
ones = torch.ones((512, 512), dtype=torch.bfloat16)
exact_bf16 = on_gpu or bool((ones @ ones == 512).all())  # a CPU without AVX-512 sums in bfloat16, which ends at 256
exact = {"sqrt": exact_roots, "gemm-bf16-": exact_bf16}
asked = [Problem(**given) for given in problems]
right = [all(found or part not in p.name for part, found in exact.items()) for p in asked]
print(json.dumps([device.compute_answer(p, 3) if known else None for p, known in zip(asked, right)]))
"""


def answers(python: str, problems: list[Any], *spoilt: str) -> list[str | None]:
    """Returns PyTorch's answers to small problems, on a GPU if there is one."""
    given = [{name: getattr(p, name) for name in p.__dataclass_fields__} for p in problems]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [python, "-c", ASK]
    ran = subprocess.run(
        words, env=environ, input=json.dumps([spoilt, given]), capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    found: list[str | None] = json.loads(ran.stdout)
    return found


@pytest.mark.torch
def test_pytorch_and_numpy_give_the_same_answers_in_every_format(torch_python: str) -> None:
    small = [replace(p, **SMALL[p.work]) for p in (*PROBLEMS, *VOTED_PROBLEMS)]
    found = dict(zip(small, answers(torch_python, small), strict=True))
    computed = {p: a for p, a in found.items() if a is not None}
    assert {p.format for p in computed} >= {"f32", "f64", "tf32", "i64"}
    assert [p.name for p, a in computed.items() if p.work != "special" and a != right_answer(p, 3)] == []
    assert all(len(found[p] or "") == 16 for p in small if p.work == "special")


@pytest.mark.torch
@pytest.mark.parametrize("stages", [("input", "march"), ("output",)])
def test_a_changed_value_on_the_device_changes_its_answer(torch_python: str, stages: tuple[str, ...]) -> None:
    works = ("gemm", "alu", "march") if "march" in stages else ("gemm", "alu")
    small = [replace(p, **SMALL[p.work]) for p in PROBLEMS if p.work in works and p.format in ("f64", "i64")]
    for problem, answer in zip(small, answers(torch_python, small, *stages), strict=True):
        assert answer != right_answer(problem, 3), problem.name


@pytest.mark.torch
def test_a_worker_reports_a_round_of_known_and_one_of_voted_answers(torch_python: str) -> None:
    program = (
        "import sys; from dataclasses import replace; from agents.collectors.canary import gpu_worker as w;"
        "w.PROBLEMS = tuple(replace(p, size=64) for p in w.PROBLEMS if p.format == 'f64' and p.work == 'gemm');"
        "w.VOTED_PROBLEMS = tuple(replace(p, size=4096) for p in w.VOTED_PROBLEMS);"
        "sys.exit(w.main(['--device', 'cpu', '--index', '6', '--seconds', '0']))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run([torch_python, "-c", program], env=environ, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line.get("begin", False) for line in lines] == [True, False, True, False]
    exact, special = lines[1], lines[3]
    assert exact["device"] == special["device"] == "6"
    assert exact["canary"] == "gemm-f64-random.0"  # another size than the known one: a wrong answer
    assert special["canary"] == "gpu-special.0"
    assert "expected" not in special
    assert special["version"] != exact["version"]


def test_a_march_without_faults_has_an_answer_of_zeros() -> None:
    march = next(p for p in PROBLEMS if p.work == "march")
    assert right_answer(march, 0) == digest_array(np.zeros((gpu_problems.MARCH_READS, 2), np.int64))


def test_a_gpu_with_mig_instances_is_not_used(nvml_library: Path) -> None:
    program = (
        "from agents.collectors.canary.gpu_program import NvmlGpus\n"
        "g = NvmlGpus(None); print([g.is_usable(one) for one in g.gpus]); g.close()"
    )
    environ = nvml_stub.environment(nvml_library, ("gpus 3", "mig 1")) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[True, False, True]\n", "")
