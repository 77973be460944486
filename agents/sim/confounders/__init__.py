"""Benign events that look like faults: a page on them is false."""
