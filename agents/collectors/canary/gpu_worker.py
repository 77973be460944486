"""The GPU canary's worker: computes rounds on one GPU with PyTorch; a line of JSON before and after each.

Started by agents.collectors.canary.gpu_program, or by hand:

    CUDA_VISIBLE_DEVICES=3 python -m agents.collectors.canary.gpu_worker --seconds 60
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from agents.collectors.canary.arithmetic import digest_array
from agents.collectors.canary.cpu_program import WriteLine, write_line
from agents.collectors.canary.gpu_problems import (
    MARCH_READS,
    PROBLEMS,
    VERSION,
    VOTED_PROBLEMS,
    elementwise_inputs,
    row_weights,
)
from agents.collectors.canary.known_answers import load_known_answers
from agents.collectors.canary.problems import EXPONENTS, VARIANTS, Integers, Problem, integer_operand
from agents.collectors.canary.rounds import CanaryTask, run_round
from pipeline.runtime.supervise import set_parent_death_signal

REPEATS = 128
"""How often a GPU computes a product with the same operands. Chosen: it takes an H100 17 ms, beside 80 ms for
making the operands. A CPU does it twice, to test the code."""
CHUNK_WORDS = 1 << 25
"""Words of a march per pass, 256 MiB: 1 ms each, so that no kernel delays a job. Chosen."""
_PROBE_ROWS = 32
"""Rows of the product that tests whether device and library support a format: the least that all accept."""

CorruptTensor = Callable[[str, Any], None]


class TorchDevice:
    """One device. memory: share of its free memory for marches. disturb: for tests, as in arithmetic.py."""

    def __init__(self, name: str, memory: float = 0.5, disturb: CorruptTensor | None = None) -> None:
        """Raises ImportError without torch, RuntimeError without the device."""
        self._torch: Any = importlib.import_module("torch")
        self._device = self._torch.device(name)
        self._memory, self._corrupt = memory, disturb or (lambda stage, values: None)
        self._unsupported: dict[str, str] = {}
        self._fix_precision()
        self._torch.ones(1, device=self._device).sum().item()

    def _fix_precision(self) -> None:
        """Sets single precision sums, whatever this version's defaults are."""
        options = self._torch.backends.cuda.matmul
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            with contextlib.suppress(
                AssertionError, AttributeError
            ):  # torch raises it for options that it does not have
                setattr(options, name, False)

    @property
    def software(self) -> str:
        """Everything on which answers may depend where arithmetic rounds."""
        torch = self._torch
        cuda = self._device.type == "cuda"
        sku = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        return f"{sku} torch {torch.__version__} CUDA {torch.version.cuda}"

    def compute_answer(self, problem: Problem, variant: int) -> str | None:
        """Returns the digest of this device's answer; None if device or library lacks the format or the memory."""
        try:
            if problem.work == "march":
                return digest_array(self._run_march(problem, variant))
            if problem.work == "gemm":
                return self._rarest_digest(self._products(problem, variant)) if self._supports(problem) else None
            return digest_array(self._fold(self._elementwise(problem, variant).reshape(64, -1)))
        except RuntimeError as error:
            if "out of memory" in str(error):
                return None
            return f"raised {type(error).__name__}"

    # --- products -----------------------------------------------------------------------------------------------------

    def _supports(self, problem: Problem) -> bool:
        """Whether a small product of this format works; the error is kept."""
        if problem.format not in self._unsupported:
            small = Problem(problem.name, "gemm", problem.format, "ones", _PROBE_ROWS, 1, _PROBE_ROWS)
            try:
                self._multiply(small, *self._operands(small, 0)).sum().item()
                self._unsupported[problem.format] = ""
            except (RuntimeError, AttributeError, TypeError) as error:
                self._unsupported[problem.format] = str(error)[:200] or type(error).__name__
        return not self._unsupported[problem.format]

    def _operands(self, problem: Problem, variant: int) -> tuple[Any, Any]:
        a, b = (self._torch.from_numpy(integer_operand(problem, variant, side)).to(self._device) for side in "ab")
        factor = 2.0 ** EXPONENTS.get(problem.range, 0)
        return self._to_format(problem.format, a, factor), self._to_format(problem.format, b, factor)

    def _to_format(self, format_: str, values: Any, factor: float) -> Any:
        torch = self._torch
        if format_ == "i8":
            return values.to(torch.int8)
        kind = {"f64": "float64", "bf16": "bfloat16", "f16": "float16", "f8": "float8_e4m3fn"}
        wide = values.to(torch.float64) * factor
        return wide.to(getattr(torch, kind.get(format_.removesuffix("-wide"), "float32")))

    def _multiply(self, problem: Problem, a: Any, b: Any) -> Any:
        """Returns one product, by the kernels of its format."""
        torch, format_ = self._torch, problem.format
        if format_ == "i8":
            return torch._int_mm(a, b)
        if format_ == "f8":
            one = torch.ones((), device=self._device)
            return torch._scaled_mm(a, b.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        if format_.endswith("-wide"):
            return torch.mm(a, b, out_dtype=torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = format_ == "tf32"
        return torch.mm(a, b)

    def _products(self, problem: Problem, variant: int) -> Sequence[Integers]:
        a, b = self._operands(problem, variant)
        self._corrupt("input", a)
        return [self._fold(self._multiply(problem, a, b)) for _ in range(REPEATS if self._on_gpu else 2)]

    def _fold(self, answer: Any) -> Integers:
        """Folds rows to words on the device, then copies them."""
        self._corrupt("output", answer)
        torch = self._torch
        size = answer.element_size()
        bits = answer.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).to(torch.int64)
        factors = torch.from_numpy(row_weights(bits.shape[1])).to(self._device)
        found: Integers = (bits * factors).sum(dim=1).cpu().numpy()
        return found

    def _rarest_digest(self, folded: Sequence[Integers]) -> str:
        """Returns the digest of all repetitions, or of the rarest answer."""
        digests = [digest_array(f) for f in folded]
        return min(digests, key=digests.count)

    # --- elementwise --------------------------------------------------------------------------------------------------

    def _elementwise(self, problem: Problem, variant: int) -> Any:
        torch, name = self._torch, problem.name.partition("-")[2]
        a, b = (torch.from_numpy(values).to(self._device) for values in elementwise_inputs(problem, variant))
        self._corrupt("input", a)
        if problem.work == "special":
            return getattr(torch, name)(((a >> 38).to(torch.float32) + 1) * 2.0**-20)
        if name.endswith("f32"):
            x, y = (a >> 38).to(torch.float32), (b & 0xFFFFFF | 1).to(torch.float32)
            return x / y if name.startswith("divide") else torch.sqrt(x)
        if name.endswith("f64"):
            x, y = (a >> 10).to(torch.float64), (b & (2**52 - 1) | 1).to(torch.float64)
            return x / y if name.startswith("divide") else torch.sqrt(x)
        if name == "scatter":
            spread = torch.empty_like(a)
            spread[torch.sort(b, stable=True)[1]] = a
            return spread
        return {
            "divide": lambda: torch.div(a, b, rounding_mode="floor"),
            "modulo": lambda: torch.remainder(a, b),
            "multiply": lambda: a * b,
            "shift": lambda: (a << (b & 63)) ^ (a >> (b & 31)),
            "sort": lambda: torch.sort(a)[0],
            "running-sum": lambda: torch.cumsum(a, 0),
        }[name]()

    # --- memory -------------------------------------------------------------------------------------------------------

    def _run_march(self, problem: Problem, variant: int) -> Integers:
        """Returns wrong words and wrong bits of each reading, all 0 if sound; see arithmetic.run_march."""
        torch, found = self._torch, np.zeros((MARCH_READS, 2), np.int64)
        chunks = [torch.empty(CHUNK_WORDS if self._on_gpu else 1 << 16, dtype=torch.int64, device=self._device)
                  for _ in range(self._count_chunks())]  # fmt: skip
        for chunk in chunks:
            found += self._run_passes(chunk, self._background(problem, variant, len(chunk)))
        return found

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _count_chunks(self) -> int:
        """Returns how many chunks fit the share of memory; all are held together, so that each has its own pages."""
        if not self._on_gpu:
            return 1
        free, _ = self._torch.cuda.mem_get_info(self._device)
        return max(1, int(self._memory * free) // (8 * CHUNK_WORDS))

    def _background(self, problem: Problem, variant: int, count: int) -> Any:
        torch = self._torch
        if problem.range == "address":
            return torch.arange(count, dtype=torch.int64, device=self._device) * 0x0001000100010001 + variant
        word = 0x5555555555555555 if problem.range == "checker" else 0
        return torch.full((1,), word, dtype=torch.int64, device=self._device)

    def _run_passes(self, held: Any, plain: Any) -> Integers:
        inverse, found = ~plain, []
        held.copy_(plain.expand_as(held))
        for there, next_ in ((plain, inverse), (inverse, plain), (plain, inverse), (inverse, plain)):
            self._corrupt("march", held)
            found.append(self._compare_words(held, there))
            held.copy_(next_.expand_as(held))
        self._corrupt("march", held)
        found.append(self._compare_words(held, plain))
        return np.array(found, np.int64)

    def _compare_words(self, held: Any, wanted: Any) -> tuple[int, int]:
        """Returns the number of wrong words, and the sum of their differing bits modulo 2^63."""
        wrong = int((held != wanted).sum().item())
        return (wrong, int((held ^ wanted).sum().item()) & (2**63 - 1)) if wrong else (0, 0)


EXACT, SPECIAL = "gpu", "gpu-special"
"""Labels of the rounds with known answers, and of those that are compared by vote."""


def build_tasks(variant: int, software: str) -> Iterator[CanaryTask]:
    """Yields the rounds with one set of inputs. Answers that are rounded are compared only with the same software."""
    yield CanaryTask(EXACT, VERSION, PROBLEMS, variant, load_known_answers().get(VERSION, {}))
    version = hashlib.blake2b(f"{VERSION} {software}".encode(), digest_size=4).hexdigest()
    yield CanaryTask(SPECIAL, version, VOTED_PROBLEMS, variant, {})


def run_rounds(device: TorchDevice, index: str, seconds: float, variant: int, write: WriteLine) -> int:
    """Runs sets of inputs until `seconds` have passed, at least one; returns how many."""
    began, count, parent = time.monotonic(), 0, os.getppid()
    while os.getppid() == parent and (not count or time.monotonic() - began < seconds):
        for task in build_tasks((variant + count) % VARIANTS, device.software):
            write(task.describe_start(index))
            result = run_round(task, index, device.compute_answer, clock=time.monotonic)
            write(result or {"device": index, "yielded": True})
        count += 1
    return count


def main(words: list[str] | None = None, disturb: CorruptTensor | None = None) -> int:
    """Runs the worker. `disturb` is for tests: it may corrupt the computation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0", help="as torch names it")
    parser.add_argument("--index", default="0", help="the GPU's number in the output")
    parser.add_argument("--seconds", type=float, default=20.0, help="time on the GPU; at least one round")
    parser.add_argument("--variant", type=int, default=0, help="first set of inputs")
    parser.add_argument("--memory", type=float, default=0.5, help="share of its free memory to march over")
    options = parser.parse_args(words)
    set_parent_death_signal(signal.SIGKILL)
    os.nice(19)
    try:
        device = TorchDevice(options.device, options.memory, disturb)
    except ImportError as error:
        write_line({"absent": f"torch cannot be loaded: {error}; pip install 'fleetpulse[torch]'"})
        return 3
    except RuntimeError as error:
        write_line({"absent": f"{options.device} does not start: {error}"})
        return 3
    run_rounds(device, options.index, options.seconds, options.variant, write_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
