"""The hook with PyTorch: digests are those of NumPy, and a step of the optimizer is a step."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from agents.collectors.training import Training
from agents.training import TorchSteps, replica_digest

torch = pytest.importorskip("torch", reason="no torch here: pip install 'fleetpulse[torch]'")


@pytest.mark.parametrize("size", [1, 3, 8, 1001])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "bool"])
def test_a_tensor_has_the_digest_of_the_same_bits_in_numpy(dtype: str, size: int) -> None:
    tensors = [torch.randn(size).to(getattr(torch, dtype)), torch.randn(2 * size).to(getattr(torch, dtype))]
    assert replica_digest(tensors) == replica_digest([tensor.numpy() for tensor in tensors]) != 0
    assert replica_digest([tensors[0], tensors[1].numpy()]) == replica_digest(tensors)
    assert replica_digest([tensors[0].numpy(), tensors[1]]) == replica_digest(tensors)


def test_brain_floats_parameters_and_views_have_a_digest() -> None:
    whole = torch.randn(33).bfloat16()
    assert replica_digest(whole[1:]) == replica_digest(whole[1:].clone()) != replica_digest(whole)
    parameter = torch.nn.Parameter(torch.randn(4, 5))
    assert replica_digest(parameter.t()) == replica_digest(parameter.detach().t().contiguous().numpy())


def test_each_step_of_the_optimizer_is_reported_with_loss_norm_and_digests(tmp_path: Path) -> None:
    collector = Training(socket=str(tmp_path / "t.sock"))
    collector.open("n1")
    with contextlib.closing(collector):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = TorchSteps(optimizer, digest_every=2, job="j", rank=0, socket=str(tmp_path / "t.sock"))
        if steps.steps.trouble:
            pytest.skip(steps.steps.trouble)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            steps.computed()
            steps.loss(loss)
            steps.gradient_norm(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            steps.tokens(8)
            optimizer.step()
        events, entities, end = [], (), time.monotonic() + 20
        while len(events) < 2 and time.monotonic() < end:
            (reading,) = collector.read()
            events += reading.events
            entities = reading.entities or entities
        columns = {name: values.tolist() for name, values in reading.columns.items()}
        assert entities == ("rank:j.0",)
        assert (columns["rank.step"], columns["rank.tokens"], columns["rank.refused"]) == ([4], [32], [0])
        assert columns["rank.loss"] == [pytest.approx(float(loss))]
        assert columns["rank.step_time"][0] > columns["rank.compute_time"][0] > 0
        assert [(e.data["step"], e.data["bucket"]) for e in events] == [(2, "group0"), (4, "group0")]
        assert events[1].data["digest"] == f"{replica_digest(list(model.parameters())):016x}"
        steps.close()
        optimizer.step()
        assert steps.steps._step == 4
