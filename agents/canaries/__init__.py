"""Canaries: known problems with exact answers, computed on a core or an idle GPU to see whether it computes right."""

VARIANTS = 8
"""Sets of inputs, one per round in turn. Chosen: other data find more than repetition does, and the detector remembers
64 questions, of which the CPU's and a GPU's take 24. It stands here, since the agent needs no more of the problems."""
