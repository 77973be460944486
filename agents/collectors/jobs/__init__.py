"""Which jobs, ranks and pipeline stages run on this node, and on which GPUs: Slurm, Kubernetes, torchrun, MPI."""
