"""Training scripts and the collector `training` over a real socket: nothing waits, nothing raises, all is counted."""

from __future__ import annotations

import array
import contextlib
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import NoData, Reading
from agents.collectors.registry import configured_collectors
from agents.collectors.training import agent_socket, datagram, training
from agents.collectors.training.agent_socket import DatagramSender, socket_paths
from agents.collectors.training.datagram import RankSender
from agents.collectors.training.training import Training
from agents.node.batches import check_reading
from agents.training import Steps, TorchSteps, TrainerSteps, replica_digest
from pipeline.model.errors import ConfigError

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
PRELUDE = "from agents.training import Steps; steps = Steps(job='j', rank=0)\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket's path, for script and collector."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "FLEETPULSE_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEETPULSE_TRAINING_SOCKET", str(tmp_path / "t.sock"))
    return tmp_path / "t.sock"


@pytest.fixture
def collector(path: Path) -> Iterator[Training]:
    made = Training()
    made.open("n1")
    yield made
    made.close()


@pytest.fixture
def wait_for_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reports wait for the kernel's queue of ten datagrams, which steps of microseconds would fill."""
    went = DatagramSender.send

    def goes(self: DatagramSender, data: bytes) -> bool:
        end = time.monotonic() + PATIENCE_S
        while not went(self, data):
            assert time.monotonic() < end
            time.sleep(0.001)
        return True

    monkeypatch.setattr(DatagramSender, "send", goes)


def row(reading: Reading, entity: str) -> dict[str, float]:
    at = reading.entities.index(entity)
    return {name: values[at].item() for name, values in reading.columns.items()}


def read_until(collector: Training, until: Callable[[Reading], bool]) -> Reading:
    """Reads until a read satisfies the condition."""
    end = time.monotonic() + PATIENCE_S
    while True:
        readings = collector.read()
        for reading in readings:
            check_reading(reading, collector.inventory())
        if until(readings[0]):
            return readings[0]
        assert time.monotonic() < end, readings
        time.sleep(0.01)


def at_step(number: int, entity: str = "rank:j.0") -> Callable[[Reading], bool]:
    return lambda reading: entity in reading.entities and row(reading, entity)["rank.step"] >= number


def started(program: str, **environment: str) -> subprocess.Popen[bytes]:
    """Starts a training script that waits for a line before it ends."""
    words = [sys.executable, "-c", PRELUDE + program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_step_arrives_with_all_its_values(collector: Training) -> None:
    steps = Steps("j", 0, 4, stage=2, gpu=5, group="dp1", first=100)
    with steps.step(tokens=512) as step:
        time.sleep(0.002)
        step.computed()
        time.sleep(0.001)
        step.communicated()
        step.loss(np.float32(2.5))
        step.gradient_norm(0.5)
        step.digest("layer0", 10)
    steps.checkpoint(12.5)
    events: list[Any] = []
    found = read_until(collector, lambda r: bool(events.extend(r.events)) or len(events) == 2)
    values = row(found, "rank:j.0")
    assert (values["rank.step"], values["rank.tokens"], values["rank.loss"]) == (101, 512, 2.5)
    assert values["rank.gradient_norm"] == 0.5
    assert values["rank.compute_time"] >= 0.002
    assert values["rank.communication_time"] >= 0.001
    assert values["rank.step_time"] >= values["rank.compute_time"] + values["rank.communication_time"]
    assert [values[f"rank.{name}"] for name in ("drops", "refused", "nonfinite")] == [0, 0, 0]
    digest, checkpoint = events
    assert (digest.entity, digest.kind) == ("rank:j.0", "replica_digest")
    assert digest.data == {"step": 101, "bucket": "layer0", "digest": "000000000000000a", "group": "dp1"}
    assert (checkpoint.entity, checkpoint.kind) == ("job:j", "checkpoint")
    assert checkpoint.data == {"seconds": 12.5, "step": 101, "rank": 0}
    inventory = collector.inventory()
    assert inventory["rank:j.0"].parents == ("stage:j.2", "job:j", "gpu:n1.5", "node:n1")
    assert inventory["rank:j.0"].attributes == {"node": "n1", "world_size": 4, "group": "dp1", "uid": os.getuid()}
    assert inventory["stage:j.2"].parents == ("job:j",)


def test_the_identity_of_a_rank_comes_from_the_environment(
    collector: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_events = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "8", "PP_RANK": "1"}
    for name, value in found_events.items():
        monkeypatch.setenv(name, value)
    Steps().report()
    read_until(collector, at_step(1, "rank:n1-29500.3"))
    assert collector.inventory()["rank:n1-29500.3"].parents[:2] == ("stage:n1-29500.1", "job:n1-29500")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    Steps().report()
    read_until(collector, at_step(1, "rank:4711.3"))


def test_a_script_without_a_launcher_is_a_separate_job(collector: Training) -> None:
    Steps().report()
    read_until(collector, at_step(1, f"rank:n1-{os.getpid()}.0"))


def test_a_step_that_ended_by_an_exception_is_not_reported(collector: Training) -> None:
    steps = Steps("j", 0)
    with pytest.raises(KeyError), steps.step():
        raise KeyError
    steps.report(tokens=1)
    assert row(read_until(collector, at_step(1)), "rank:j.0")["rank.tokens"] == 1


class RaisesAlways:
    """Raises on every use."""

    def __float__(self) -> float:
        raise RuntimeError

    def __int__(self) -> int:
        raise RuntimeError

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.usefixtures("wait_for_queue")
def test_invalid_values_are_counted_and_never_raise(collector: Training) -> None:
    steps = Steps("j", 0)
    bad: tuple[Any, ...] = ("x", RaisesAlways(), [1], -1.0, math.inf, 1e9)
    for value in bad:
        steps.report(step_time=value)
    steps.report(tokens=-1)
    steps.report(tokens="many")
    steps.report(step=-5)
    steps.report(loss="x")
    steps.report(loss=RaisesAlways(), gradient_norm=[1, 2])
    steps.report(digests={"a b": 1, "ok": 2, "": 3, "big": 2**64, 7: 1})  # type: ignore[dict-item] # on purpose
    steps.report(digests={"a": RaisesAlways()})  # type: ignore[dict-item] # on purpose
    steps.report(digests=3)  # type: ignore[arg-type] # on purpose
    steps.checkpoint("x")  # type: ignore[arg-type] # on purpose
    steps.report()
    found = row(read_until(collector, at_step(15)), "rank:j.0")
    assert found["rank.refused"] == steps.refused == len(bad) + 3 + 1 + 2 + 4 + 1 + 1 + 1
    assert found["rank.drops"] == 0


def test_infinite_losses_and_norms_are_counted_and_missing(collector: Training) -> None:
    steps = Steps("j", 0)
    for value in (math.nan, math.inf, -math.inf, 1e39, np.float32("nan")):
        steps.report(loss=value, gradient_norm=2.0)
    steps.report(gradient_norm=math.nan)
    found = row(read_until(collector, at_step(6)), "rank:j.0")
    assert (found["rank.nonfinite"], found["rank.refused"]) == (6, 0)
    assert math.isnan(found["rank.loss"])


@pytest.mark.slow
def test_refused_datagrams_are_logged_every_ten_minutes_with_the_reason(
    collector: Training, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    collector._clock = lambda: now[0]
    for last in (*range(7, 128, 8), 128, 129):  # eight fit in a socket's shortest queue
        for number in range(last - 7, last + 1) if last < 128 else (last,):
            Steps(f"j{number}", 0).report()
        read_until(collector, lambda _: len(collector._ranks.list_senders()) + collector._ranks.refused > last)  # noqa: B023
    collector.read()
    refused = "collector training: 1 datagrams refused; last: from process"
    limit = "too many ranks; at most 256, 128 of one user\n"
    (message,) = capsys.readouterr().err.splitlines(keepends=True)
    assert message.startswith(refused)
    assert message.endswith(f"rank:j128.0: {limit}")
    now[0] += 600.0
    collector.read()
    (message,) = capsys.readouterr().err.splitlines(keepends=True)
    assert message.startswith(refused)
    assert message.endswith(f"rank:j129.0: {limit}")
    now[0] += 600.0
    collector.read()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong", [{"rank": "x"}, {"rank": 8, "world": 8}, {"rank": -1}, {"job": RaisesAlways()}, {"gpu": 1e9}]
)
def test_an_invalid_identity_is_logged_once_and_raises_nothing(
    wrong: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(**{"job": "j", **wrong})
    for _ in range(3):
        steps.report(loss=1.0)
    assert (steps.dropped, capsys.readouterr().err.count("training steps are not reported")) == (3, 1)


@pytest.mark.slow
def test_without_an_agent_reports_are_dropped_and_the_next_one_has_the_count(path: Path) -> None:
    steps = Steps("j", 0)
    for _ in range(10):
        steps.report(tokens=5)
    assert steps.dropped == 10
    collector = Training()
    collector.open("n1")
    with contextlib.closing(collector):
        until_sent(steps)
        found = row(read_until(collector, at_step(11)), "rank:j.0")
        assert found["rank.drops"] == steps.dropped
        assert found["rank.tokens"] == 50


def until_sent(steps: Steps) -> None:
    """Reports until one is sent: a script checks for a new agent once a second."""
    end = time.monotonic() + PATIENCE_S
    while True:
        before = steps.dropped
        steps.report()
        if steps.dropped == before:
            return
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_restarted_agent_is_found(path: Path) -> None:
    steps = Steps("j", 0)
    for _ in range(3):
        collector = Training()
        collector.open("n1")
        until_sent(steps)
        read_until(collector, at_step(1))
        collector.close()
        assert not path.exists()


def test_a_full_queue_drops_reports_without_waiting(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nobody_reads:
        nobody_reads.bind(str(path))
        steps = Steps("j", 0)
        began = time.perf_counter()
        for _ in range(2000):
            steps.report(step_time=1.0)
        took = time.perf_counter() - began
        assert steps.dropped > 1000
        assert took < 2.0  # 2000 steps; one wait would take longer


def test_a_socket_that_stays_full_is_replaced_by_a_new_one_at_the_path(path: Path) -> None:
    clock = [0.0]
    first = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    first.bind(str(path))
    sender = DatagramSender([str(path)], lambda: clock[0])
    while sender.send(b"x"):
        pass
    path.unlink()
    with first, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        second.bind(str(path))
        clock[0] = agent_socket.STUCK_S / 2
        assert not sender.send(b"x")
        clock[0] = agent_socket.STUCK_S + 1
        assert not sender.send(b"x")
        assert sender.send(b"y")
        assert second.recv(10) == b"y"
    sender.close()


def test_a_forked_child_starts_from_zero(collector: Training) -> None:
    steps = Steps("j", 0)
    steps.report(tokens=100)
    read_until(collector, at_step(1))
    child = os.fork()
    if not child:
        try:  # the child must never continue as a second pytest process
            steps.report(tokens=1)
            os._exit(0 if (steps._step, steps._tokens) == (1, 1) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps.report(tokens=100)
    assert row(read_until(collector, at_step(2)), "rank:j.0")["rank.tokens"] == 200


def test_a_pickled_copy_starts_from_zero(collector: Training) -> None:
    steps = pickle.loads(pickle.dumps(Steps("j", 0, first=10)))
    steps.report()
    read_until(collector, at_step(11))


def test_a_signal_handler_may_report_during_a_report(collector: Training) -> None:
    steps = Steps("j", 0)
    before = signal.signal(signal.SIGALRM, lambda *_: steps.report())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(5000):
            steps.report()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until_sent(steps)
    read_until(collector, at_step(5001))


def test_threads_may_share_one_object(collector: Training) -> None:
    steps = Steps("j", 0)
    threads = [threading.Thread(target=lambda: [steps.report(tokens=1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until_sent(steps)
    found = row(read_until(collector, at_step(2001)), "rank:j.0")
    assert found["rank.tokens"] == 2000


def test_a_rank_of_a_killed_process_is_reported_once_more_and_then_removed(collector: Training) -> None:
    script = started("steps.report(tokens=9); print(flush=True); input()")
    assert script.stdout is not None
    script.stdout.readline()
    read_until(collector, at_step(1))
    script.send_signal(signal.SIGKILL)
    script.communicate()
    read_until(collector, lambda reading: not reading.entities)
    assert collector.inventory() == {}


def test_a_hung_rank_keeps_its_last_step(collector: Training) -> None:
    script = started("steps.report(); print(flush=True); input()")
    assert script.stdout is not None
    script.stdout.readline()
    read_until(collector, at_step(1))
    for _ in range(5):
        (reading,) = collector.read()
        assert row(reading, "rank:j.0")["rank.step"] == 1
    script.communicate(b"\n")


def test_two_agents_never_share_a_socket_and_a_stale_one_is_replaced(path: Path) -> None:
    first, second = Training(), Training()
    first.open("n1")
    with pytest.raises(NoData, match="another agent on this node listens there and receives the steps"):
        second.open("n1")
    assert path.exists()
    first.close()
    script = f"import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind({str(path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.exists()
    second.open("n1")
    second.close()
    assert not path.exists()


def test_a_file_that_is_not_a_socket_is_kept(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(NoData, match="exists and is not a socket"):
        Training().open("n1")
    assert path.read_text() == "mine"


def test_a_removed_or_replaced_socket_is_no_data_and_opened_again(collector: Training, path: Path) -> None:
    path.unlink()
    with pytest.raises(NoData, match="removed, or replaced by another agent"):
        collector.read()
    collector.close()
    collector.open("n1")
    steps = Steps("j", 0)
    steps.report()
    read_until(collector, at_step(1))


def test_a_missing_or_foreign_folder_is_no_data_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoData, match="RuntimeDirectory=fleetpulse"):
        Training(socket=str(tmp_path / "absent" / "t.sock")).open("n1")
    with pytest.raises(NoData, match=r"path too long.*RuntimeDirectory=fleetpulse"):
        Training(socket=str(tmp_path / ("x" * 108))).open("n1")
    monkeypatch.delenv("FLEETPULSE_TRAINING_SOCKET", raising=False)
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    monkeypatch.setattr("agents.collectors.training.agent_socket.SERVICE_SOCKET", str(tmp_path / "absent" / "t.sock"))
    own = Training()
    own.open("n1")
    assert (tmp_path / "own" / "fleetpulse" / "training.sock").is_socket()
    assert DatagramSender(socket_paths(os.environ)).send(b"x")
    own.close()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(NoData, match="RuntimeDirectory=fleetpulse"):
        own.open("n1")


def test_every_user_may_send_with_any_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        collector = Training()
        collector.open("n1")
        assert path.stat().st_mode & 0o777 == 0o666
        collector.close()
        limited = Training(mode="0660")
        limited.open("n1")
        assert path.stat().st_mode & 0o777 == 0o660
        limited.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", ["0999", "rw", "", "0o666"])
def test_an_invalid_file_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="expected a file mode in octal"):
        configured_collectors({"training": {"mode": mode}}, "f.toml")


def test_damaged_datagrams_are_counted_and_harm_no_other_rank(collector: Training, path: Path) -> None:
    steps = Steps("j", 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hostile:
        hostile.connect(str(path))
        handles = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        before = len(os.listdir("/proc/self/fd"))
        for data in (
            b"",
            b"x",
            b"FPTS",
            b"\0" * 20_000,
            datagram.encode_header(9, b"{}"),
            datagram.encode_header(1, b"{}"),
        ):
            hostile.sendmsg([data], handles)
    until_sent(steps)
    read_until(collector, at_step(1))
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the script's own socket; no descriptor that was sent
    collector._rhythm._last_slots.clear()
    _, node = collector.read()
    assert (node.entities, node.columns["node.training_refused"].tolist()) == (("node:n1",), [6])
    assert "from process" in collector.inventory()["node:n1"].attributes["training_refused"]


def test_a_flood_of_datagrams_is_limited_and_does_not_delay_a_read(collector: Training, path: Path) -> None:
    flood = datagram.encode_header(datagram.STEP, datagram.encode_identity(RankSender("f", 0))) + b"x"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hostile:
        hostile.connect(str(path))
        hostile.setblocking(False)
        end, sent = time.monotonic() + 0.5, 0
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                sent += hostile.send(flood) > 0
    began = time.perf_counter()
    collector.read()
    assert time.perf_counter() - began < 1.0
    most = training.MAX_AT_ONCE * (0.5 / training.PAUSE_S + 2)
    assert 0 < collector._ranks.refused <= most + 600  # and the kernel's queue: 512 at most by default


def test_training_scripts_load_only_the_standard_library() -> None:
    program = (
        "import sys; import agents.training; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names - {'__main__'}))"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['agents']"


# --- digests and callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int8, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 1001])
def test_any_flipped_bit_changes_the_digest(dtype: Any, size: int) -> None:
    values = np.random.default_rng(1).integers(0, 100, size).astype(dtype)
    before = replica_digest(values)
    assert before == replica_digest(values.copy()) < 2**64
    raw = values.view(np.uint8)
    for bit in np.linspace(0, raw.size * 8, 50, endpoint=False, dtype=int)[: raw.size * 8]:
        raw[bit // 8] ^= 1 << (bit % 8)
        assert replica_digest(values) != before
        raw[bit // 8] ^= 1 << (bit % 8)
    assert replica_digest(values) == before


def test_a_digest_depends_on_the_order_of_arrays_and_accepts_any_layout() -> None:
    a, b = np.arange(10.0), np.arange(10.0, 20.0)
    assert replica_digest([a, b]) != replica_digest([b, a])
    assert replica_digest([a]) == replica_digest(a) == replica_digest(np.repeat(a, 2)[::2])
    assert replica_digest(np.arange(20, dtype=np.uint8)[3:]) == replica_digest(np.arange(3, 20, dtype=np.uint8))
    assert replica_digest([]) == 0
    assert replica_digest(np.array(1.5)) == replica_digest(np.array([1.5]))


def test_the_trainer_callback_reports_steps_logs_and_checkpoints(collector: Training) -> None:
    """Called like Hugging Face's CallbackHandler: every event by name, with state as a keyword or positional."""

    class State:
        global_step = 0

    callback, state = TrainerSteps(job="j", rank=0), State()
    callback.on_train_begin(None, state, None, model=None)
    for number in (41, 42):
        callback.on_step_begin(None, state, None, model=None)
        state.global_step = number
        callback.on_log(None, state, None, logs={"loss": 1.5, "grad_norm": 2.0, "epoch": 1}, model=None)
        callback.on_step_end(None, state, None, model=None)
    callback.on_save(None, state, None, model=None)
    kinds: list[str] = []
    found = read_until(collector, lambda r: bool(kinds.extend(e.kind for e in r.events)) or kinds == ["checkpoint"])
    values = row(found, "rank:j.0")
    assert (values["rank.step"], values["rank.loss"], values["rank.gradient_norm"]) == (42, 1.5, 2.0)
    with pytest.raises(AttributeError):
        _ = callback.no_such_thing


@pytest.mark.usefixtures("wait_for_queue")
def test_the_example_in_the_docs_runs_and_its_steps_arrive(
    collector: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.S)
    assert example
    monkeypatch.setenv("FLEETPULSE_JOB", "documents")
    exec(compile(example[1], "docs/training.md", "exec"), {})
    events: list[Any] = []
    found = read_until(collector, lambda r: bool(events.extend(r.events)) or len(events) == 2)
    values = row(found, "rank:documents.0")
    assert (values["rank.step"], values["rank.tokens"], values["rank.refused"]) == (10, 320, 0)
    assert values["rank.step_time"] > values["rank.compute_time"] > 0
    assert [event.data["step"] for event in events] == [5, 10]


def test_a_truncated_datagram_is_refused_even_if_the_rest_can_be_decoded(
    collector: Training, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = datagram.STEP_BODY.pack(
        *(getattr(datagram.StepReport(7, 0, 0, 0, 0), f) for f in datagram.StepReport.__slots__)
    )
    whole = datagram.encode_header(datagram.STEP, datagram.encode_identity(RankSender("cut", 0))) + body
    monkeypatch.setattr(training, "MAX_DATAGRAM", len(whole))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(str(path))
        other.send(whole + b"more")
        other.send(whole.replace(b"cut", b"not"))
    read_until(collector, at_step(7, "rank:not.0"))
    assert collector._ranks.refused == 1
    assert list(collector._ranks.list_senders()) == ["rank:not.0"]


class Parameter:
    """A parameter with a gradient, as an optimizer of PyTorch holds it."""

    def __init__(self) -> None:
        self.grad: Any = None


class Optimizer:
    """An optimizer with the hook of PyTorch 2."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [Parameter(), Parameter()]}]

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        self.step = hook
        return contextlib.nullcontext()


def test_gradients_of_one_batch_are_digested_every_so_many_steps_and_put_back(collector: Training) -> None:
    optimizer = Optimizer()
    first, second = optimizer.param_groups[0]["params"]
    steps = TorchSteps(optimizer, job="j", rank=0)
    ran = []
    events: list[Any] = []

    def found(reading: Reading) -> bool:
        events.extend(e for e in reading.events if e.kind == "replica_digest")
        return bool(events)

    def backward() -> None:
        ran.append(first.grad)
        first.grad = np.arange(4.0)

    def fail() -> None:
        raise RuntimeError("out of memory")

    for number in range(5):
        first.grad = second.grad = np.full(3, number)
        steps.check_gradients(backward if number < 4 else fail, every=2)
        assert first.grad[0] == second.grad[0] == number
        optimizer.step()
    assert ran == [None, None]
    read_until(collector, found)
    assert steps.steps.refused == 1
    wanted = f"{replica_digest([np.arange(4.0)]):016x}"
    assert {(e.data["bucket"], e.data["digest"]) for e in events} == {("gradients", wanted)}
