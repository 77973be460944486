"""Steps: reports a training script's steps to the agent. It never waits for the agent and never raises.

TorchSteps hooks a PyTorch optimizer, and TrainerSteps is a callback of Hugging Face's Trainer. No framework is loaded
here; their documented interfaces are used.
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

from agents.collectors.jobs.process_identity import clean_name, identify_process
from agents.collectors.training.agent_socket import DatagramSender, socket_paths
from agents.collectors.training.datagram import (
    CHECKPOINT,
    CHECKPOINT_BODY,
    DIGESTS,
    MAX_DIGESTS,
    MAX_FLOAT32,
    MAX_SECONDS,
    NODE_PLACEHOLDER,
    STEP,
    STEP_BODY,
    RankSender,
    encode_digests,
    encode_header,
    encode_identity,
    is_bucket_name,
)
from agents.collectors.training.digest import replica_digest

_MAX_COUNT = (1 << 64) - 2  # a counter's highest value means "missing"


class Step:
    """One step in progress, from `with steps.step() as step:`. Values that are not given are missing."""

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
        """Reports the step; a step that ends by an exception is not reported."""
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
        """Marks the end of forward and backward, before the collective."""
        self._computed = perf_counter()

    def communicated(self) -> None:
        """Marks the end of the collective."""
        self._communicated = perf_counter()

    def number(self, number: Any) -> None:
        """Sets the step's number, if the script counts its steps."""
        self._number = number

    def tokens(self, tokens: Any) -> None:
        """Sets the number of tokens of this rank in this step."""
        self._tokens = tokens

    def loss(self, value: Any) -> None:
        """Sets the loss: a number, or what float() accepts."""
        self._loss = value

    def gradient_norm(self, value: Any) -> None:
        """Sets the norm of the gradient before clipping."""
        self._norm = value

    def digest(self, bucket: str, value: int) -> None:
        """Adds the replica_digest of a bucket of parameters after the step."""
        if self._digests is None:
            self._digests = {}
        self._digests[bucket] = value


class Steps:
    """Reports the steps of one rank to the agent on this machine.

    The rank's identity comes from the environment (Slurm, torchrun, MPI, a pod's manifest); arguments override it.
    group: ranks of one group hold the same parameters (a data-parallel group; "" for all of a stage). first: steps
    finished before, as after a restart from a checkpoint.

    dropped: datagrams that were not sent; refused: values that could not be used. Threads may share one object; after a
    fork the child's copy starts from zero.
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
        self._identity_arguments, self._options = (job, rank, world, stage, gpu, group), (socket, first)
        self._first, self._paths = first, (socket,) if socket else socket_paths(os.environ)
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments alone: a copy, as in a spawned process, starts from zero."""
        return Steps, (*self._identity_arguments, *self._options)

    def _reset(self) -> None:
        """Sets all counts to zero, for the current process."""
        self._pid, self._lock = os.getpid(), RLock()  # a signal's handler may report, too
        self.dropped = self.refused = self._nonfinite = self._tokens = 0
        self._step, self._sender = self._to_count(self._first, 0), DatagramSender(self._paths)
        self.problem = ""
        try:
            identity_bytes = encode_identity(resolve_sender(*self._identity_arguments))
        except Exception as wrong:  # noqa: BLE001 - an argument of any kind must not end a training
            self._disable(str(wrong))
            identity_bytes = b""
        self._headers = {kind: encode_header(kind, identity_bytes) for kind in (STEP, DIGESTS, CHECKPOINT)}

    def _disable(self, trouble: str) -> None:
        """Logs once why nothing is reported; from then on every report counts as dropped."""
        self.problem = f"training steps are not reported: {trouble}"
        with suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"fleetpulse: {self.problem}\n")

    def step(self, tokens: int = 0, number: int | None = None) -> Step:
        """Returns a step for a `with` block; the block's duration is the step's."""
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
        """Reports one finished step in one call. step: its number, default: last one plus 1; durations in seconds."""
        if os.getpid() != self._pid:
            self._reset()
        try:
            with self._lock:
                self._count_step(step, tokens)
                # valid floats skip the conversion: even an empty call would cost most of the time allowed here
                if type(step_time) is not float or not 0.0 <= step_time <= MAX_SECONDS:
                    step_time = self._to_seconds(step_time)
                if type(compute_time) is not float or not 0.0 <= compute_time <= MAX_SECONDS:
                    compute_time = self._to_seconds(compute_time)
                if type(communication_time) is not float or not 0.0 <= communication_time <= MAX_SECONDS:
                    communication_time = self._to_seconds(communication_time)
                if type(loss) is not float or not -MAX_FLOAT32 <= loss <= MAX_FLOAT32:
                    loss = self._to_number(loss)
                if type(gradient_norm) is not float or not -MAX_FLOAT32 <= gradient_norm <= MAX_FLOAT32:
                    gradient_norm = self._to_number(gradient_norm)
                totals = self._step, self._tokens, self.dropped, self.refused, self._nonfinite
                body = STEP_BODY.pack(*totals, step_time, compute_time, communication_time, loss, gradient_norm)
                self._send(STEP, body)
                if digests:
                    self._send_digests(digests)
        except Exception:  # noqa: BLE001 - an error here must not end a training; it is counted
            self.refused += 1

    def checkpoint(self, seconds: float | None = None) -> None:
        """Reports a written checkpoint; one rank of the job should call it."""
        if os.getpid() != self._pid:
            self._reset()
        try:
            with self._lock:
                self._send(CHECKPOINT, CHECKPOINT_BODY.pack(self._step, self._to_seconds(seconds)))
        except Exception:  # noqa: BLE001 - as above
            self.refused += 1

    def close(self) -> None:
        """Closes the socket; a later report opens another one."""
        self._sender.close()

    def _count_step(self, step: Any, tokens: Any) -> None:
        """Updates the totals with this step; an invalid step number or token count is refused."""
        self._step = self._to_count(step, self._step + 1) if step is not None else self._step + 1
        if tokens:
            self._tokens = min(self._tokens + self._to_count(tokens, 0), _MAX_COUNT)

    def _to_count(self, value: Any, instead: int) -> int:
        try:
            found = int(value)
        except Exception:  # noqa: BLE001 - a value may be an object identity_bytes __int__ raises anything
            found = -1
        if 0 <= found <= _MAX_COUNT:
            return found
        self.refused += 1
        return instead

    def _to_seconds(self, value: Any) -> float:
        """Returns a duration; NaN if there is none."""
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

    def _to_number(self, value: Any) -> float:
        """Returns a loss or norm: NaN if not given; infinite, and counted, if not finite."""
        if value is None:
            return nan
        try:
            found = float(value)
        except Exception:  # noqa: BLE001 - as above
            self.refused += 1
            return nan
        if -MAX_FLOAT32 <= found <= MAX_FLOAT32:
            return found
        self._nonfinite += 1
        return inf

    def _send(self, kind: int, body: bytes) -> None:
        if self.problem or not self._sender.send(self._headers[kind] + body):
            self.dropped += 1

    def _send_digests(self, digests: Mapping[str, int]) -> None:
        good = [
            (bucket.encode(), int(value))
            for bucket, value in digests.items()
            if is_bucket_name(bucket) and 0 <= int(value) < 1 << 64
        ][:MAX_DIGESTS]
        self.refused += len(digests) - len(good)
        if good:
            self._send(DIGESTS, encode_digests(self._step, good))


def resolve_sender(
    job: str, rank: int | None, world: int | None, stage: str | int, gpu: int | None, group: str | int
) -> RankSender:
    """Returns the identity of this process: arguments, else the environment, else a job of this process alone."""
    found = identify_process(os.environ, NODE_PLACEHOLDER)
    if found is None:
        name, number, size, part = f"{NODE_PLACEHOLDER}-{os.getpid()}", 0, 0, ""
    else:
        name, number, size, part = found.job, found.rank or 0, found.world_size or 0, found.stage
    return RankSender(
        clean_name(str(job)) or name,
        number if rank is None else int(rank),
        size if world is None else int(world),
        clean_name(str(stage)) or part,
        -1 if gpu is None else int(gpu),
        clean_name(str(group)),
    )


class TorchSteps:
    """Reports a step at the end of each `optimizer.step()`; its duration is the time since the step before.

    digest_every: sends the digest of each parameter group every so many steps; 0: never. Between two calls of
    optimizer.step() the script may call `computed()`, `communicated()`, `loss(x)`, `gradient_norm(x)` and `tokens(n)`.
    On a GPU, `computed()` is exact only after `torch.cuda.synchronize()` or another wait for the device. Other
    arguments are those of Steps. Optimizers of torch 2.0 and newer have hooks; of older ones `step` is wrapped.
    """

    def __init__(self, optimizer: Any, digest_every: int = 0, **identity: Any) -> None:
        self.steps = Steps(**identity)
        self._optimizer, self._every, self._done = optimizer, digest_every, 0
        self._step = self.steps.step()
        hook = getattr(optimizer, "register_step_post_hook", None)
        self._handle = hook(self._report_step) if hook else _WrappedStep(optimizer, self._report_step)

    def _report_step(self, *_: Any) -> None:
        self._done += 1
        if self._every and self._done % self._every == 0:
            for number, group in enumerate(self._optimizer.param_groups):
                self.digest(f"group{number}", group["params"])
        self._step.__exit__(None, None, None)
        self._step = self.steps.step()

    def digest(self, bucket: str, parameters: Any) -> None:
        """Adds the digest of some parameters to the step in progress."""
        try:
            self._step.digest(bucket, replica_digest(parameters))
        except Exception:  # noqa: BLE001 - a failing device fails in the training itself; here it is only counted
            self.steps.refused += 1

    def check_gradients(self, backward: Callable[[], Any], every: int = 100) -> None:
        """Every so many steps sends the digest of the gradients that `backward` computes, which must be the same on all
        replicas: of one fixed batch, with deterministic kernels, and without an all-reduce (`model.no_sync()`).

        Call it between two steps. The gradients of the parameters are then as before.
        """
        if self._done % every:
            return
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            backward()
            self.digest("gradients", [p.grad for p in parameters if p.grad is not None])
        except Exception:  # noqa: BLE001 - as in `digest`
            self.steps.refused += 1
        finally:
            for p, grad in zip(parameters, before, strict=True):
                p.grad = grad

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method of the step in progress."""
        if name not in ("computed", "communicated", "loss", "gradient_norm", "tokens"):
            raise AttributeError(name)
        method: Callable[..., None] = getattr(self._step, name)
        return method

    def close(self) -> None:
        """Removes the hook from the optimizer."""
        self._handle.remove()
        self.steps.close()


class _WrappedStep:
    """Calls `hook` after each step of an optimizer without hooks."""

    def __init__(self, optimizer: Any, hook: Callable[..., None]) -> None:
        self._hook: Callable[..., None] | None = hook
        inner = optimizer.step

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            """Calls the optimizer's step, then the hook."""
            result = inner(*args, **kwargs)
            if self._hook is not None:
                self._hook()
            return result

        optimizer.step = step

    def remove(self) -> None:
        """Stops the calls. The wrapper stays: a scheduler may have wrapped it in turn."""
        self._hook = None


class TrainerSteps:
    """A callback for Hugging Face's Trainer: `trainer.add_callback(TrainerSteps())`.

    A step lasts from on_step_begin to on_step_end; loss and gradient norm are the last logged ones.
    """

    def __init__(self, **identity: Any) -> None:
        self.steps = Steps(**identity)
        self._step = self.steps.step()
        self._logged: dict[str, Any] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts a step."""
        self._step = self.steps.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Keeps loss and gradient norm for the step's report."""
        self._logged = {key: logs[key] for key in ("loss", "grad_norm") if key in logs} if logs else {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports the step."""
        self._step.number(state.global_step)
        self._step.loss(self._logged.pop("loss", None))
        self._step.gradient_norm(self._logged.pop("grad_norm", None))
        self._step.__exit__(None, None, None)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Reports a checkpoint."""
        self.steps.checkpoint()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method that ignores its call, for every other event of a Trainer."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None
