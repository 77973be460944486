"""The page that a training script reads: Steps reports each step to the agent on this machine.

    from agents.training import Steps

    steps = Steps()                          # job, rank and stage from Slurm, torchrun or MPI; arguments override them
    for batch in batches:
        with steps.step(tokens=batch.size) as step:
            loss = forward_and_backward(batch)
            step.computed()                  # before the collective; on a GPU behind whatever waits for the device
            all_reduce(gradients)
            step.communicated()
            optimizer.step()
            step.loss(loss)
            step.gradient_norm(norm)

It never waits, never raises and needs no agent. docs/training.md shows the rest.
"""

from agents.collectors.training.digest import replica_digest
from agents.collectors.training.steps import Step, Steps, TorchSteps, TrainerSteps

__all__ = ["Step", "Steps", "TorchSteps", "TrainerSteps", "replica_digest"]
