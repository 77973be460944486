"""Devices that have software of their own: of cores only those of different nodes have."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.topology import kind_of


def places(devices: Iterable[str]) -> int:
    """How many of the devices may have software of their own: the cores of one node have one."""
    return len({d.rpartition(".")[0] if kind_of(d) == "cpu" else d for d in devices})
