"""Computes the GPU canary's rounds on one GPU with PyTorch; a line of JSON before and after each.

Started by agents.collectors.canary.gpu_program, or by hand:

    CUDA_VISIBLE_DEVICES=3 python -m agents.collectors.canary.gpu_worker --seconds 60

Computes the problems of the GPU canary with PyTorch, on whichever device it has. Loads torch when it is made.
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

from agents.collectors.canary.arithmetic import digest
from agents.collectors.canary.cpu_program import Emit, emit
from agents.collectors.canary.gpu_problems import PASSES, PROBLEMS, VERSION, VOTED, inputs, weights
from agents.collectors.canary.known_answers import known
from agents.collectors.canary.problems import EXPONENTS, VARIANTS, Problem, Whole, whole
from agents.collectors.canary.rounds import Task, asked
from pipeline.runtime.supervise import end_with_parent

REPEATS = 128
"""How often a GPU computes a product with the same operands. Chosen: in the time in which they are made and copied. A
CPU does it twice, to try the path."""
CHUNK = 1 << 25
"""Words that a march walks over at a time, 256 MiB: 1 ms per pass, so that no kernel keeps a job waiting. Chosen."""
_PROBE = 32
"""Rows of the product by which is found out whether device and library have a format: the least that all take."""

Disturb = Callable[[str, Any], None]


class TorchDevice:
    """One device. memory: share of its free memory that marches walk over. disturb: for tests, as in arithmetic.py."""

    def __init__(self, name: str, memory: float = 0.5, disturb: Disturb | None = None) -> None:
        """Raises ImportError without torch, RuntimeError without the device."""
        self._torch: Any = importlib.import_module("torch")
        self._device = self._torch.device(name)
        self._memory, self._disturb = memory, disturb or (lambda stage, values: None)
        self._lacking: dict[str, str] = {}
        self._fixed()
        self._torch.ones(1, device=self._device).sum().item()

    def _fixed(self) -> None:
        """Single precision sums, whatever the defaults of this version are."""
        options = self._torch.backends.cuda.matmul
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            with contextlib.suppress(AssertionError, AttributeError):  # torch says so of what its version does not have
                setattr(options, name, False)

    @property
    def software(self) -> str:
        """All that the answers may depend on where arithmetic rounds."""
        torch = self._torch
        cuda = self._device.type == "cuda"
        sku = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        return f"{sku} torch {torch.__version__} CUDA {torch.version.cuda}"

    def answer(self, problem: Problem, variant: int) -> str | None:
        """The digest of this device's answer; None where device or library lacks the format or the memory."""
        try:
            if problem.work == "march":
                return digest(self._march(problem, variant))
            if problem.work == "gemm":
                return self._one(self._products(problem, variant)) if self._has(problem) else None
            return digest(self._folded(self._elementwise(problem, variant).reshape(64, -1)))
        except RuntimeError as error:
            if "out of memory" in str(error):
                return None
            return f"raised {type(error).__name__}"

    # --- products -----------------------------------------------------------------------------------------------------

    def _has(self, problem: Problem) -> bool:
        """Whether a small product of this format works; what is said instead is kept."""
        if problem.format not in self._lacking:
            small = Problem(problem.name, "gemm", problem.format, "ones", _PROBE, 1, _PROBE)
            try:
                self._multiply(small, *self._operands(small, 0)).sum().item()
                self._lacking[problem.format] = ""
            except (RuntimeError, AttributeError, TypeError) as error:
                self._lacking[problem.format] = str(error)[:200] or type(error).__name__
        return not self._lacking[problem.format]

    def _operands(self, problem: Problem, variant: int) -> tuple[Any, Any]:
        a, b = (self._torch.from_numpy(whole(problem, variant, side)).to(self._device) for side in "ab")
        factor = 2.0 ** EXPONENTS.get(problem.range, 0)
        return self._typed(problem.format, a, factor), self._typed(problem.format, b, factor)

    def _typed(self, format_: str, values: Any, factor: float) -> Any:
        torch = self._torch
        if format_ == "i8":
            return values.to(torch.int8)
        kind = {"f64": "float64", "bf16": "bfloat16", "f16": "float16", "f8": "float8_e4m3fn"}
        wide = values.to(torch.float64) * factor
        return wide.to(getattr(torch, kind.get(format_.removesuffix("-wide"), "float32")))

    def _multiply(self, problem: Problem, a: Any, b: Any) -> Any:
        """One product, by the kernels of its format."""
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

    def _products(self, problem: Problem, variant: int) -> Sequence[Whole]:
        a, b = self._operands(problem, variant)
        self._disturb("input", a)
        return [self._folded(self._multiply(problem, a, b)) for _ in range(REPEATS if self._on_gpu else 2)]

    def _folded(self, answer: Any) -> Whole:
        """Rows to words on the device, then copied out."""
        self._disturb("output", answer)
        torch = self._torch
        size = answer.element_size()
        bits = answer.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).to(torch.int64)
        factors = torch.from_numpy(weights(bits.shape[1])).to(self._device)
        found: Whole = (bits * factors).sum(dim=1).cpu().numpy()
        return found

    def _one(self, folded: Sequence[Whole]) -> str:
        """The one digest of all repetitions, or that of the rarest answer."""
        digests = [digest(f) for f in folded]
        return min(digests, key=digests.count)

    # --- elementwise --------------------------------------------------------------------------------------------------

    def _elementwise(self, problem: Problem, variant: int) -> Any:
        torch, name = self._torch, problem.name.partition("-")[2]
        a, b = (torch.from_numpy(values).to(self._device) for values in inputs(problem, variant))
        self._disturb("input", a)
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

    def _march(self, problem: Problem, variant: int) -> Whole:
        """Wrong words and wrong bits of each reading, all 0 if sound; see arithmetic.march."""
        torch, found = self._torch, np.zeros((PASSES, 2), np.int64)
        chunks = [torch.empty(CHUNK if self._on_gpu else 1 << 16, dtype=torch.int64, device=self._device)
                  for _ in range(self._room())]  # fmt: skip
        for chunk in chunks:
            found += self._passes(chunk, self._background(problem, variant, len(chunk)))
        return found

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _room(self) -> int:
        """Chunks that fit the share of memory; all are held at once, so that each has pages of its own."""
        if not self._on_gpu:
            return 1
        free, _ = self._torch.cuda.mem_get_info(self._device)
        return max(1, int(self._memory * free) // (8 * CHUNK))

    def _background(self, problem: Problem, variant: int, count: int) -> Any:
        torch = self._torch
        if problem.range == "address":
            return torch.arange(count, dtype=torch.int64, device=self._device) * 0x0001000100010001 + variant
        word = 0x5555555555555555 if problem.range == "checker" else 0
        return torch.full((1,), word, dtype=torch.int64, device=self._device)

    def _passes(self, held: Any, plain: Any) -> Whole:
        inverse, found = ~plain, []
        held.copy_(plain.expand_as(held))
        for there, next_ in ((plain, inverse), (inverse, plain), (plain, inverse), (inverse, plain)):
            self._disturb("march", held)
            found.append(self._read(held, there))
            held.copy_(next_.expand_as(held))
        self._disturb("march", held)
        found.append(self._read(held, plain))
        return np.array(found, np.int64)

    def _read(self, held: Any, wanted: Any) -> tuple[int, int]:
        """Wrong words, and how many of the differing words' values there are in all, as their sum modulo 2^63."""
        wrong = int((held != wanted).sum().item())
        return (wrong, int((held ^ wanted).sum().item()) & (2**63 - 1)) if wrong else (0, 0)


EXACT, SPECIAL = "gpu", "gpu-special"
"""Labels of the rounds with known answers and of those that are voted on."""


def tasks(variant: int, software: str) -> Iterator[Task]:
    """What is asked with one set of inputs. Where arithmetic rounds, only the same software may be compared."""
    yield Task(EXACT, VERSION, PROBLEMS, variant, known().get(VERSION, {}))
    version = hashlib.blake2b(f"{VERSION} {software}".encode(), digest_size=4).hexdigest()
    yield Task(SPECIAL, version, VOTED, variant, {})


def rounds(device: TorchDevice, index: str, seconds: float, variant: int, tell: Emit) -> int:
    """Goes on with the next set of inputs until `seconds` have passed, one set at least; how many it came to."""
    began, count, parent = time.monotonic(), 0, os.getppid()
    while os.getppid() == parent and (not count or time.monotonic() - began < seconds):
        for task in tasks((variant + count) % VARIANTS, device.software):
            tell(task.opening(index))
            result = asked(task, index, device.answer, clock=time.monotonic)
            tell(result or {"device": index, "yielded": True})
        count += 1
    return count


def main(words: list[str] | None = None, disturb: Disturb | None = None) -> int:
    """`disturb` is for tests: it may corrupt what is computed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0", help="as torch names it")
    parser.add_argument("--index", default="0", help="the GPU's number in what is told")
    parser.add_argument("--seconds", type=float, default=20.0, help="time on the GPU, a round at least")
    parser.add_argument("--variant", type=int, default=0, help="first set of inputs")
    parser.add_argument("--memory", type=float, default=0.5, help="share of its free memory that is marched over")
    options = parser.parse_args(words)
    end_with_parent(signal.SIGKILL)
    os.nice(19)
    try:
        device = TorchDevice(options.device, options.memory, disturb)
    except ImportError as error:
        emit({"absent": f"torch cannot be loaded: {error}; pip install 'fleetpulse[torch]'"})
        return 3
    except RuntimeError as error:
        emit({"absent": f"{options.device} does not start: {error}"})
        return 3
    rounds(device, options.index, options.seconds, options.variant, emit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
