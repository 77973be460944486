"""Training steps: the datagrams of a training script, and what the agent keeps of them."""
