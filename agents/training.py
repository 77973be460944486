"""The page for training scripts: Steps reports each step to the agent on this machine.

    from agents.training import Steps

    steps = Steps()                          # job, rank and stage from Slurm, torchrun or MPI; arguments override them
    for batch in batches:
        with steps.step(tokens=batch.size) as step:
            loss = forward_and_backward(batch)
            step.computed()                  # before the collective; on a GPU after a wait for the device
            all_reduce(gradients)
            step.communicated()
            optimizer.step()
            step.loss(loss)
            step.gradient_norm(norm)

It never waits, never raises and needs no agent. More: docs/training.md.
"""

from agents.collectors.training.digest import replica_digest
from agents.collectors.training.steps import Step, Steps, TorchSteps, TrainerSteps

__all__ = ["Step", "Steps", "TorchSteps", "TrainerSteps", "replica_digest"]
