"""The character devices by which programs use an RDMA port: uverbs for data, umad and issm for management."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agents.sources.nics.attribute import names_in, once


def char_devices(sys_class: Path) -> Mapping[str, tuple[str, ...]]:
    """`mlx5_0` -> its uverbs, `mlx5_0.1` -> umad and issm of its port 1; from infiniband_verbs and infiniband_mad."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in ("infiniband_verbs", "infiniband_mad"):
        for name in names_in(sys_class / folder):
            device = once(sys_class / folder / name / "ibdev")
            port = once(sys_class / folder / name / "port")
            if device:
                key = f"{device}.{port}" if port else device
                found[key] = (*found.get(key, ()), name)
    return found


def usable(devices: Mapping[str, tuple[str, ...]], device: str, port: int, ethernet: bool) -> bool:
    """Whether a port has what programs need: uverbs, and on InfiniBand umad and issm too (rdma_cap_ib_smi)."""
    verbs = any(name.startswith("uverbs") for name in devices.get(device, ()))
    managed = {name.rstrip("0123456789") for name in devices.get(f"{device}.{port}", ())}
    return verbs and (ethernet or {"umad", "issm"} <= managed)
