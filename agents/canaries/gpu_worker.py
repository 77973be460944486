"""Computes the GPU canary's rounds on one GPU with PyTorch; a line of JSON before and after each.

Started by agents.canaries.gpu, or by hand: CUDA_VISIBLE_DEVICES=3 python -m agents.canaries.gpu_worker --seconds 60
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from agents.canaries.cpu import Emit, emit
from agents.canaries.gpu_problems import PROBLEMS, VERSION, VOTED
from agents.canaries.known import known
from agents.canaries.problems import VARIANTS
from agents.canaries.rounds import Task, asked
from agents.canaries.torch_device import Disturb, TorchDevice
from pipeline.supervise import end_with_parent

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
