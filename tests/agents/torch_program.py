"""Run by a Python with PyTorch as a training script; prints its results as JSON.

    python torch_program.py digests | train SOCKET own|hooks

digests: pairs of digests that must be equal, and pairs that must differ. train: four steps of a real optimizer;
`hooks`: of one with the hooks of torch 2, even if this torch is older.
"""

from __future__ import annotations

import json
import sys

import torch

from agents.training import TorchSteps, replica_digest

DTYPES = ("float32", "float64", "float16", "int8", "bool")


class Handle:
    """The return value of register_step_post_hook."""

    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook

    def remove(self):
        self.hooks.remove(self.hook)


class Hooked(torch.optim.SGD):
    """An optimizer with the documented hooks of torch 2."""

    def register_step_post_hook(self, hook):
        self.__dict__.setdefault("after", []).append(hook)
        return Handle(self.after, hook)

    def step(self, *args, **kwargs):
        result = super().step(*args, **kwargs)
        for hook in self.__dict__.get("after", []):
            hook(self, args, kwargs)
        return result


def digests():
    equal, different = [], []
    for dtype in DTYPES:
        for size in (1, 3, 8, 1001):
            kind = getattr(torch, dtype)
            tensors = [(20 * torch.randn(size)).to(kind), (20 * torch.randn(2 * size)).to(kind)]
            wanted = replica_digest([tensor.numpy() for tensor in tensors])
            mixed = [tensors[0], tensors[1].numpy()], [tensors[0].numpy(), tensors[1]]
            name = f"{dtype}[{size}]"
            equal += [(name, replica_digest(given), wanted) for given in (tensors, *mixed)]
            different.append((name, wanted, 0))
    whole = torch.randn(33).bfloat16()
    equal.append(("bfloat16 view", replica_digest(whole[1:]), replica_digest(whole[1:].clone())))
    different.append(("bfloat16 view", replica_digest(whole[1:]), replica_digest(whole)))
    parameter = torch.nn.Parameter(torch.randn(4, 5))
    plain = parameter.t().detach().contiguous().numpy()
    equal.append(("transposed parameter", replica_digest(parameter.t()), replica_digest(plain)))
    return {"equal": equal, "different": different}


def train(socket, kind):
    model = torch.nn.Linear(4, 2)
    optimizer = (Hooked if kind == "hooks" else torch.optim.SGD)(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    steps = TorchSteps(optimizer, digest_every=2, job="j", rank=0, socket=socket)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        steps.computed()
        steps.loss(loss)
        steps.gradient_norm(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        steps.tokens(8)
        optimizer.step()
        schedule.step()
    seen = {"loss": float(loss), "digest": f"{replica_digest(list(model.parameters())):016x}"}
    steps.close()
    optimizer.step()
    return {**seen, "steps": steps.steps._step, "trouble": steps.steps.problem}


if __name__ == "__main__":
    torch.manual_seed(1)
    sys.stdout.write(json.dumps(digests() if sys.argv[1] == "digests" else train(*sys.argv[2:])))
