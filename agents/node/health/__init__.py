"""`fleetpulse check`: whether this node is fit for a job, as its agent and the pipeline know it. Loads no NumPy."""
