"""Parts of the jobs collector: who a process is in a training job, and where that can be read."""
