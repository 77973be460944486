"""Reporting steps without a line per step: hooks of a PyTorch optimizer, and a callback of the Trainer's shape.

No framework is loaded here; the objects are used by their documented faces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agents.sources.training.digest import replica_digest
from agents.sources.training.steps import Steps


class TorchSteps:
    """Reports a step at the end of each `optimizer.step()`; its length is the time since the one before.

    digest_every: after so many steps the digest of each parameter group goes along; 0: never. Between two calls of
    optimizer.step() the script may tell `computed()`, `communicated()`, `loss(x)`, `gradient_norm(x)` and `tokens(n)`.
    On a GPU `computed()` is true only behind `torch.cuda.synchronize()` or whatever else waits for the device. Other
    arguments are those of Steps. Optimizers of torch 2.0 or newer have hooks for it; of older ones `step` is wrapped.
    """

    def __init__(self, optimizer: Any, digest_every: int = 0, **identity: Any) -> None:
        self.steps = Steps(**identity)
        self._optimizer, self._every, self._done = optimizer, digest_every, 0
        self._step = self.steps.step()
        hook = getattr(optimizer, "register_step_post_hook", None)
        self._handle = hook(self._finished) if hook else _WrappedStep(optimizer, self._finished)

    def _finished(self, *_: Any) -> None:
        self._done += 1
        if self._every and self._done % self._every == 0:
            for number, group in enumerate(self._optimizer.param_groups):
                self.digest(f"group{number}", group["params"])
        self._step.__exit__(None, None, None)
        self._step = self.steps.step()

    def digest(self, bucket: str, parameters: Any) -> None:
        """Adds the digest of some parameters to the step under way."""
        try:
            self._step.digest(bucket, replica_digest(parameters))
        except Exception:  # noqa: BLE001 - a device that fails here fails in the training itself; it is counted
            self.steps.refused += 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("computed", "communicated", "loss", "gradient_norm", "tokens"):
            raise AttributeError(name)
        told: Callable[..., None] = getattr(self._step, name)
        return told

    def close(self) -> None:
        """Takes the hook off the optimizer."""
        self._handle.remove()
        self.steps.close()


class _WrappedStep:
    """Calls `hook` after each step of an optimizer that has no hooks of its own."""

    def __init__(self, optimizer: Any, hook: Callable[..., None]) -> None:
        self._hook: Callable[..., None] | None = hook
        inner = optimizer.step

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if self._hook is not None:
                self._hook()
            return result

        optimizer.step = step

    def remove(self) -> None:
        """Ends the calls. The wrapper stays: a scheduler may have wrapped it in turn."""
        self._hook = None


class TrainerSteps:
    """A callback of the shape of Hugging Face's TrainerCallback: `trainer.add_callback(TrainerSteps())`.

    A step is what lies between on_step_begin and on_step_end, loss and gradient norm are those that were logged last.
    """

    def __init__(self, **identity: Any) -> None:
        self.steps = Steps(**identity)
        self._step = self.steps.step()
        self._logged: dict[str, Any] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step = self.steps.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._logged = {key: logs[key] for key in ("loss", "grad_norm") if key in logs} if logs else {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step.number(state.global_step)
        self._step.loss(self._logged.pop("loss", None))
        self._step.gradient_norm(self._logged.pop("grad_norm", None))
        self._step.__exit__(None, None, None)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.steps.checkpoint()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other event of a Trainer, none of which says anything of a step."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None
