"""Detectors of slow ranks, GPUs, nodes and jobs, with the cause."""
