"""Steps: what a training script calls once per step. It never waits for the agent and never raises.

Reporting steps without a line per step: hooks of a PyTorch optimizer, and a callback of the Trainer's shape.

No framework is loaded here; the objects are used by their documented faces.
"""

from __future__ import annotations

import functools
import os
import sys
from _thread import RLock
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf, nan
from time import perf_counter
from types import TracebackType
from typing import Any

from agents.collectors.jobs.process_identity import clean, identify
from agents.collectors.training import datagram
from agents.collectors.training.agent_socket import Sending, places
from agents.collectors.training.datagram import GREATEST, MAX_SECONDS, STEP_BODY, Sender, bucket_is_good
from agents.collectors.training.digest import replica_digest

_MOST = (1 << 64) - 2  # a counter's highest value means "missing"


class Step:
    """One step under way, from `with steps.step() as step:`. What is not told of it is missing."""

    __slots__ = ("_began", "_communicated", "_computed", "_digests", "_loss", "_norm", "_number", "_steps", "_tokens")

    def __init__(self, steps: Steps, tokens: Any = 0, number: Any = None) -> None:
        self._steps, self._tokens, self._number = steps, tokens, number
        self._computed = self._communicated = nan
        self._loss = self._norm = None
        self._digests: dict[Any, Any] | None = None
        self._began = perf_counter()

    def __enter__(self) -> Step:
        self._began = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Reports the step; one that ended by an exception did not finish."""
        if kind is None:
            now = perf_counter()
            communication = self._communicated - self._computed
            self._steps.report(
                self._number,
                now - self._began,
                self._computed - self._began,
                communication,
                self._tokens,
                self._loss,
                self._norm,
                self._digests,
            )

    def computed(self) -> None:
        """Now forward and backward are done, and the collective has not begun."""
        self._computed = perf_counter()

    def communicated(self) -> None:
        """Now the collective is done."""
        self._communicated = perf_counter()

    def number(self, number: Any) -> None:
        """The step's number, where the script counts them itself."""
        self._number = number

    def tokens(self, tokens: Any) -> None:
        """How many tokens this rank worked on in this step."""
        self._tokens = tokens

    def loss(self, value: Any) -> None:
        """The loss: a number, or what float() makes one of."""
        self._loss = value

    def gradient_norm(self, value: Any) -> None:
        """The norm of the gradient, before clipping."""
        self._norm = value

    def digest(self, bucket: str, value: int) -> None:
        """What replica_digest gives of a bucket of parameters after the step."""
        if self._digests is None:
            self._digests = {}
        self._digests[bucket] = value


class Steps:
    """Reports the steps of one rank to the agent on this machine.

    Who the rank is stands in the environment (Slurm, torchrun, MPI, a pod's manifest); arguments override it. group:
    ranks of one name hold the same parameters (a data-parallel group; "" for all of a stage). first: steps that were
    finished before, as after a restart from a checkpoint.

    dropped: datagrams that did not go; refused: values that could not be used. Threads may share one object; after a
    fork the child's copy begins anew.
    """

    def __init__(
        self,
        job: str = "",
        rank: int | None = None,
        world: int | None = None,
        stage: str | int = "",
        gpu: int | None = None,
        group: str | int = "",
        socket: str = "",
        first: int = 0,
    ) -> None:
        self._told, self._more = (job, rank, world, stage, gpu, group), (socket, first)
        self._first, self._paths = first, (socket,) if socket else places(os.environ)
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as for a process that is spawned, begins anew."""
        return Steps, (*self._told, *self._more)

    def _begin(self) -> None:
        """Counts from the beginning, as the process that we are now."""
        self._pid, self._lock = os.getpid(), RLock()  # a signal's handler may report, too
        self.dropped = self.refused = self._nonfinite = self._tokens = 0
        self._step, self._sending = self._whole(self._first, 0), Sending(self._paths)
        self.trouble = ""
        try:
            whose = datagram.identity(sender(*self._told))
        except Exception as wrong:  # noqa: BLE001 - an argument may be anything; it must not end a training
            self.say(str(wrong))
            whose = b""
        self._heads = {
            kind: datagram.head(kind, whose) for kind in (datagram.STEP, datagram.DIGESTS, datagram.CHECKPOINT)
        }

    def say(self, trouble: str) -> None:
        """Says once why nothing is reported; from then on every report counts as dropped."""
        self.trouble = f"training steps are not reported: {trouble}"
        with suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"fleetpulse: {self.trouble}\n")

    def step(self, tokens: int = 0, number: int | None = None) -> Step:
        """A step, to be used with `with`: its length is that of the block."""
        return Step(self, tokens, number)

    def report(
        self,
        step: int | None = None,
        step_time: Any = None,
        compute_time: Any = None,
        communication_time: Any = None,
        tokens: Any = 0,
        loss: Any = None,
        gradient_norm: Any = None,
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """One finished step in one call. step: its number, by default one more than before; durations in seconds."""
        if os.getpid() != self._pid:
            self._begin()
        try:
            with self._lock:
                self._count(step, tokens)
                # what is sound already is not looked at twice: a call that does nothing costs most of what this may
                if type(step_time) is not float or not 0.0 <= step_time <= MAX_SECONDS:
                    step_time = self._seconds(step_time)
                if type(compute_time) is not float or not 0.0 <= compute_time <= MAX_SECONDS:
                    compute_time = self._seconds(compute_time)
                if type(communication_time) is not float or not 0.0 <= communication_time <= MAX_SECONDS:
                    communication_time = self._seconds(communication_time)
                if type(loss) is not float or not -GREATEST <= loss <= GREATEST:
                    loss = self._number(loss)
                if type(gradient_norm) is not float or not -GREATEST <= gradient_norm <= GREATEST:
                    gradient_norm = self._number(gradient_norm)
                totals = self._step, self._tokens, self.dropped, self.refused, self._nonfinite
                body = STEP_BODY.pack(*totals, step_time, compute_time, communication_time, loss, gradient_norm)
                self._send(datagram.STEP, body)
                if digests:
                    self._send_digests(digests)
        except Exception:  # noqa: BLE001 - whatever is wrong here must not end a training; it is counted
            self.refused += 1

    def checkpoint(self, seconds: float | None = None) -> None:
        """A checkpoint was written; one rank of the job should say so."""
        if os.getpid() != self._pid:
            self._begin()
        try:
            with self._lock:
                self._send(datagram.CHECKPOINT, datagram.CHECKPOINT_BODY.pack(self._step, self._seconds(seconds)))
        except Exception:  # noqa: BLE001 - as above
            self.refused += 1

    def close(self) -> None:
        """Lets go of the socket; a report after it opens another one."""
        self._sending.close()

    def _count(self, step: Any, tokens: Any) -> None:
        """The totals after this step; what is no number of steps or tokens is refused."""
        self._step = self._whole(step, self._step + 1) if step is not None else self._step + 1
        if tokens:
            self._tokens = min(self._tokens + self._whole(tokens, 0), _MOST)

    def _whole(self, value: Any, instead: int) -> int:
        try:
            found = int(value)
        except Exception:  # noqa: BLE001 - a value may be an object whose __int__ raises anything
            found = -1
        if 0 <= found <= _MOST:
            return found
        self.refused += 1
        return instead

    def _seconds(self, value: Any) -> float:
        """A duration; NaN where there is none."""
        if value is None:
            return nan
        try:
            found = float(value)
        except Exception:  # noqa: BLE001 - as above
            found = -1.0
        if 0 <= found <= MAX_SECONDS or (found != found and type(value) is float):
            return found
        self.refused += 1
        return nan

    def _number(self, value: Any) -> float:
        """A loss or norm: NaN where none was told, infinite where it is not finite, which is counted."""
        if value is None:
            return nan
        try:
            found = float(value)
        except Exception:  # noqa: BLE001 - as above
            self.refused += 1
            return nan
        if -GREATEST <= found <= GREATEST:
            return found
        self._nonfinite += 1
        return inf

    def _send(self, kind: int, body: bytes) -> None:
        if self.trouble or not self._sending.send(self._heads[kind] + body):
            self.dropped += 1

    def _send_digests(self, digests: Mapping[str, int]) -> None:
        good = [
            (bucket.encode(), int(value))
            for bucket, value in digests.items()
            if bucket_is_good(bucket) and 0 <= int(value) < 1 << 64
        ][: datagram.MAX_DIGESTS]
        self.refused += len(digests) - len(good)
        if good:
            self._send(datagram.DIGESTS, datagram.digests_body(self._step, good))


def sender(
    job: str, rank: int | None, world: int | None, stage: str | int, gpu: int | None, group: str | int
) -> Sender:
    """Who this process is: the arguments, else the environment, else a job of this process alone."""
    found = identify(os.environ, datagram.HERE)
    if found is None:
        name, number, size, part = f"{datagram.HERE}-{os.getpid()}", 0, 0, ""
    else:
        name, number, size, part = found.job, found.rank or 0, found.world_size or 0, found.stage
    return Sender(
        clean(str(job)) or name,
        number if rank is None else int(rank),
        size if world is None else int(world),
        clean(str(stage)) or part,
        -1 if gpu is None else int(gpu),
        clean(str(group)),
    )


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
