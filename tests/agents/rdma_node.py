"""A node's /sys and /proc in files: InfiniBand and RoCE ports, their PCIe locations, nearby GPUs, interfaces."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

CLASSIC = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors"),
    *("port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_constraint_errors", "port_xmit_wait"),
    *("port_rcv_constraint_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped"),
    *("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "unicast_rcv_packets"),
)
HARDWARE = (
    *("local_ack_timeout_err", "packet_seq_err", "out_of_sequence", "implied_nak_seq_err", "rnr_nak_retry_err"),
    *("req_transport_retries_exceeded", "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart"),
    *("roce_slow_restart_cnps", "roce_slow_restart_trans", "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored"),
    *("np_ecn_marked_roce_packets", "req_cqe_error", "resp_cqe_error", "req_cqe_flush_error", "resp_cqe_flush_error"),
    *("req_remote_access_errors", "resp_remote_access_errors", "out_of_buffer", "duplicate_request", "lifespan"),
    *("rx_icrc_encapsulated",),
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@dataclass
class RdmaNode:
    """Builds below `root`; `sys` and `proc` are what collectors are pointed to."""

    root: Path
    sys: Path = field(init=False)
    proc: Path = field(init=False)

    def __post_init__(self) -> None:
        self.sys, self.proc = self.root / "sys", self.root / "proc"
        for folder in ("infiniband", "infiniband_verbs", "infiniband_mad", "net"):
            (self.sys / "class" / folder).mkdir(parents=True)

    @property
    def rdma(self) -> Path:
        return self.sys / "class" / "infiniband"

    @property
    def net(self) -> Path:
        return self.sys / "class" / "net"

    def pci(self, place: str, vendor: str = "0x15b3", kind: str = "0x020700") -> Path:
        """A PCI device at a place such as `pci0000:1a/0000:1a:01.0/0000:1b:00.0`."""
        folder = self.sys / "devices" / place
        for name, text in {
            "vendor": vendor,
            "class": kind,
            "numa_node": "0",
            "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_width": "16",
        }.items():
            write(folder / name, text)
        link = self.sys / "bus" / "pci" / "devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def device(self, name: str, place: Path | None = None, ports: int = 1, ethernet: bool = False) -> Path:
        """An RDMA device with all counters, each counting its place in the lists above."""
        folder = self.rdma / name
        for fact, text in {"fw_ver": "28.41.1000", "board_id": "MT_0000000838", "hca_type": "MT4129"}.items():
            write(folder / fact, text)
        write(folder / "node_guid", "a088:c203:0001:0002")
        if place is not None:
            (folder / "device").symlink_to(place)
        for number in range(1, ports + 1):
            self._port(folder / "ports" / str(number), ethernet)
        self.characters(name, ports, ethernet)
        return folder

    def _port(self, folder: Path, ethernet: bool) -> None:
        for fact, text in {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "Ethernet" if ethernet else "InfiniBand",
            "lid": "0x1f",
            "gids/0": "fe80:0000:0000:0000:a088:c203:00ab:cdef",
        }.items():
            write(folder / fact, text)
        for part, names in (("counters", CLASSIC), ("hw_counters", HARDWARE)):
            for count, name in enumerate(names):
                write(folder / part / name, str(count))

    def characters(self, name: str, ports: int = 1, ethernet: bool = False) -> None:
        """The devices that programs open."""
        index = len(os.listdir(self.sys / "class" / "infiniband_verbs"))
        write(self.sys / "class" / "infiniband_verbs" / f"uverbs{index}" / "ibdev", name)
        write(self.sys / "class" / "infiniband_verbs" / "abi_version", "6") if not index else None
        for number in range(1, ports + 1):
            for kind in ("umad",) if ethernet else ("umad", "issm"):
                folder = self.sys / "class" / "infiniband_mad" / f"{kind}{index * 2 + number}"
                write(folder / "ibdev", name)
                write(folder / "port", str(number))

    def interface(self, name: str, place: Path | None = None, up: bool = True, dev_port: int = 0) -> Path:
        """A network interface, below the device at `place`."""
        folder = (place / "net" if place else self.sys / "devices" / "virtual" / "net") / name
        for fact, text in {
            "operstate": "up" if up else "down",
            "carrier": "1" if up else "0",
            "speed": "400000",
            "address": "02:00:00:00:00:01",
            "carrier_changes": "3",
            "carrier_down_count": "1",
            "dev_port": str(dev_port),
        }.items():
            write(folder / fact, text)
        for count, counter in enumerate(("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors")):
            write(folder / "statistics" / counter, str(count))
        if place is not None:
            (folder / "device").symlink_to(place)
        (self.net / name).symlink_to(folder)
        return folder

    def route(self, interface: str) -> None:
        """A default route through `interface`."""
        head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        write(self.proc / "net" / "route", f"{head}{interface}\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0")


def h100(root: Path, ports: int = 8) -> RdmaNode:
    """A node with GPU and NIC behind one PCIe switch each, a RoCE port for storage and one Ethernet port."""
    node = RdmaNode(root)
    for i in range(ports):
        bus = 0x1A + 0x10 * i
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        node.pci(f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", "0x10de", "0x030200")
        place = node.pci(f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0")
        node.device(f"mlx5_{i}", place)
        node.interface(f"ib{i}", place)
    storage = node.pci("pci0000:0a/0000:0a:01.0/0000:0b:00.0", kind="0x020000")
    node.device("mlx5_8", storage, ethernet=True)
    write(node.rdma / "mlx5_8" / "ports" / "1" / "gid_attrs" / "ndevs" / "0", "ens8")
    node.interface("ens8", storage)
    node.interface("eno1", node.pci("pci0000:00/0000:00:1c.0/0000:02:00.0", "0x8086", "0x020000"))
    node.route("eno1")
    return node
