"""A GPU node in files for benchmarks: 8 NICs, 60 sensors, energy counters, memory controllers, a stub NVML of 8 GPUs.

The kernel's own files (/proc, /dev/kmsg) are the real ones of this machine. A file on a disk is read faster than one of
a driver: what a driver's own work costs shows only on real hardware.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.agents import nvml_stub
from tests.agents.rdma_node import RdmaNode, write

SENSORS_OF_CHIPS = {"coretemp": 26, "nvme": 9, "mlx5": 16, "nct6798": 9}
"""60 temperatures, as of a board with two processors of 12 cores; chosen."""
STATISTICS = "1000"
"""Number of additional driver statistics of one interface: about as many as mlx5 has."""


def build(folder: Path) -> tuple[dict[str, dict[str, Path]], dict[str, str]]:
    """Makes the files; returns the tables [collector.NAME] of the configuration, and the environment of the agent."""
    node = _network(folder / "node")
    _sensors(folder / "hwmon")
    _energy(folder / "powercap")
    _memory(folder / "edac")
    (folder / "seen").mkdir()
    tables = {
        "infiniband": {"root": node.rdma, "proc": node.proc},
        "network": {"root": node.net, "proc": node.proc},
        "ethtool": {"root": node.net},
        "pci": {"root": node.sys / "bus/pci/devices"},
        "nvml": {"pci": folder / "no-pci", "seen": folder / "seen/gpus.json"},
        "hwmon": {"root": folder / "hwmon"},
        "powercap": {"root": folder / "powercap"},
        "edac": {"root": folder / "edac"},
    }
    return tables, _libraries(folder)


def _libraries(folder: Path) -> dict[str, str]:
    environ = nvml_stub.environment(nvml_stub.build(folder), ["gpus 8", "links 18"])
    driver, source = folder / "ethtool_stub.so", nvml_stub.SOURCE.with_name("ethtool_stub.c")
    subprocess.run([nvml_stub.compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", driver, source, "-ldl"], check=True)
    stub = {"LD_PRELOAD": str(driver), "ETHTOOL_STUB_LOG": "/dev/null", "ETHTOOL_STUB_EXTRA": STATISTICS}
    return environ | stub


def _network(root: Path) -> RdmaNode:
    """Makes a GPU and a NIC behind one PCIe switch each, and an Ethernet interface."""
    node = RdmaNode(root)
    for i in range(8):
        bus = 0x1A + 0x10 * i
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        node.pci(f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", "0x10de", "0x030200")
        place = node.pci(f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0")
        node.device(f"mlx5_{i}", place)
        node.interface(f"mlxib{i}", place)  # the stub of the driver answers for names that begin with mlx
    node.interface("eno1", node.pci("pci0000:00/0000:00:1c.0/0000:02:00.0", "0x8086", "0x020000"))
    node.route("eno1")
    return node


def _sensors(root: Path) -> None:
    for number, (name, count) in enumerate(SENSORS_OF_CHIPS.items()):
        chip = root / f"hwmon{number}"
        write(chip / "name", name)
        for sensor in range(1, count + 1):
            write(chip / f"temp{sensor}_input", str(40_000 + 137 * sensor))
            write(chip / f"temp{sensor}_label", f"Place {sensor}")
            write(chip / f"temp{sensor}_crit_alarm", "0")


def _energy(root: Path) -> None:
    for package in range(2):
        for zone, name in ((f"intel-rapl:{package}", f"package-{package}"), (f"intel-rapl:{package}:0", "dram")):
            write(root / zone / "name", name)
            write(root / zone / "energy_uj", "123456789")
            write(root / zone / "max_energy_range_uj", "262143328850")


def _memory(root: Path) -> None:
    for controller in range(4):
        home = root / f"mc{controller}"
        write(home / "mc_name", "Intel_10nm")
        for name in ("ce_count", "ue_count", "ce_noinfo_count", "ue_noinfo_count"):
            write(home / name, "0")
        for dimm in range(4):
            for name, text in {"dimm_ce_count": "0", "dimm_ue_count": "0", "size": "65536"}.items():
                write(home / f"dimm{dimm}" / name, text)
            write(home / f"dimm{dimm}" / "dimm_label", f"CPU_SrcID#{controller}_Channel#{dimm}_DIMM#0")
