"""The driver's statistics that are taken: signal, names, how often. Names are those of mlx5.

Source: the kernel's Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst. Where several names
stand, the signal is their sum: of the eight priorities of a port (IEEE 802.1Q), each of which counts by itself, and of
pauses without a priority, which a port uses instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistic:
    """One signal. gauge: a share of time in %, no counter."""

    signal: str
    names: tuple[str, ...]
    every: float = 5.0
    gauge: bool = False


def _one(signal: str, name: str, every: float = 5.0, gauge: bool = False) -> Statistic:
    return Statistic(f"nic.{signal}", (name,), every, gauge)


def _priorities(signal: str, name: str) -> Statistic:
    names = (name.replace("prioN", f"prio{priority}") for priority in range(8))
    return Statistic(f"nic.{signal}", (*names, name.replace("prioN", "global")))


STATISTICS: tuple[Statistic, ...] = (
    _one("phy_symbol_errors", "rx_pcs_symbol_err_phy"),
    _one("phy_corrected_bits", "rx_corrected_bits_phy"),
    _one("phy_bits", "rx_bits_phy"),
    *(_one(f"lane{lane}_errors", f"rx_err_lane_{lane}_phy") for lane in range(4)),
    _one("phy_crc_errors", "rx_crc_errors_phy"),
    _one("phy_rx_discards", "rx_discards_phy"),
    _one("phy_tx_discards", "tx_discards_phy"),
    _one("phy_tx_errors", "tx_errors_phy"),
    _one("phy_link_downs", "link_down_events_phy"),
    _priorities("rx_pause", "rx_prioN_pause"),
    _priorities("tx_pause", "tx_prioN_pause"),
    _priorities("rx_pause_duration", "rx_prioN_pause_duration"),
    _priorities("tx_pause_duration", "tx_prioN_pause_duration"),
    _one("pause_storm_warnings", "tx_pause_storm_warning_events"),
    _one("pause_storm_errors", "tx_pause_storm_error_events"),
    _one("pcie_stalled_reads", "outbound_pci_stalled_rd", 10.0, gauge=True),
    _one("pcie_stalled_writes", "outbound_pci_stalled_wr", 10.0, gauge=True),
    _one("pcie_stall_read_events", "outbound_pci_stalled_rd_events", 10.0),
    _one("pcie_stall_write_events", "outbound_pci_stalled_wr_events", 10.0),
    _one("pcie_rx_integrity", "rx_pci_signal_integrity", 10.0),
    _one("pcie_tx_integrity", "tx_pci_signal_integrity", 10.0),
    _one("pcie_buffer_overflows", "outbound_pci_buffer_overflow", 10.0),
)
