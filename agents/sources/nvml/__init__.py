"""NVIDIA's management library: which calls are made when, and what their answers mean."""
