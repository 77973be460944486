"""What is slow: a GPU, a node, a whole job, and why."""
