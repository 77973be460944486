"""Kinds of faults, by the part that breaks."""
