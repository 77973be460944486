"""Signals of links: measurements at both ends, as rates, and the bit error rate computed from two counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dashboards.devices.answers import Compared, Comparison, Line, Numbers
from dashboards.devices.cells import Column
from dashboards.rates import unit_per_hour

LEVELS = {
    "port": (
        "nic.state", "nic.rx_bytes", "nic.tx_bytes", "nic.module_temperature", "nic.rx_power_min", "nic.tx_power_min",
        "nic.speed", "nic.bias_max",
    ),
    "nvlink": ("nvlink.state", "nvlink.rx_data", "nvlink.tx_data", "nvlink.speed", "nvlink.symbol_ber"),
}  # fmt: skip
"""State, traffic and optics."""
ERRORS = {
    "port": (
        ("nic.symbol_errors", "nic.carrier_downs", "nic.link_recoveries", "nic.crc_errors", "nic.rx_errors",
         "nic.port_rx_errors", "nic.integrity_errors", "nic.phy_symbol_errors"),
        ("nic.phy_corrected_bits", "nic.phy_bits", "nic.ack_timeouts", "nic.out_of_sequence", "nic.rx_dropped",
         "nic.tx_dropped", "nic.port_tx_wait", "nic.ecn_marked"),
    ),
    "nvlink": (
        ("nvlink.crc_errors", "nvlink.replay_errors", "nvlink.recovery_errors", "nvlink.symbol_errors",
         "nvlink.effective_errors", "nvlink.rx_errors", "nvlink.integrity_errors", "nvlink.recoveries"),
    ),
}  # fmt: skip
"""Counters, in requests of eight."""
BER_OF = ("nic.phy_corrected_bits", "nic.phy_bits")
"""Corrected bits per received bit: the bit error rate before forward error correction."""
BER = "pre-FEC bit error rate"
END_COLUMNS = (
    Column("nic.state", "State"),
    Column("nic.logical_state", "Subnet manager's state"),
    Column("nic.phys_state", "Physical state"),
    Column("nic.speed", "Speed", low_is_bad=True),
    Column("nic.width", "Width"),
    Column("nic.fec_mode", "Error correction"),
    Column("nic.module_temperature", "Module temperature", high_is_bad=True),
    Column("nic.rx_power_min", "Power received, weakest lane", low_is_bad=True),
    Column("nic.tx_power_min", "Power sent, weakest lane", low_is_bad=True),
    Column("nic.bias_max", "Laser current, highest lane", high_is_bad=True),
    Column("nic.module_voltage", "Module voltage"),
    Column("nic.temperature", "NIC temperature", high_is_bad=True),
    Column("nic.carrier_downs", "Link downs since reset"),
    Column("nic.symbol_errors", "Symbol errors since reset"),
    Column("nvlink.state", "State"),
    Column("nvlink.speed", "Speed", low_is_bad=True),
)
NEIGHBOUR_COLUMNS = (
    Column("nic.state", "State"),
    Column("nic.speed", "Speed", low_is_bad=True),
    Column("nic.module_temperature", "Module", high_is_bad=True),
    Column("nic.rx_power_min", "Rx power", low_is_bad=True),
    Column("nic.carrier_downs", "Link downs"),
    Column("nic.symbol_errors", "Symbol errors"),
)


def with_bit_error_rate(found: Comparison) -> Comparison:
    """Returns the signals with the bit error rate in place of the two counters from which it is computed."""
    by_name = {signal.name: signal for signal in found.signals}
    corrected, bits = (by_name.get(name) for name in BER_OF)
    others = tuple(signal for signal in found.signals if signal.name not in BER_OF)
    if corrected is None or bits is None or not corrected.has_data() or not bits.has_data():
        return replace(found, signals=others)
    lines = tuple(
        Line(a.entity, _ratio(a.values, b.values), None, None) for a, b in zip(corrected.lines, bits.lines, strict=True)
    )
    rate = replace(
        corrected,
        name=BER,
        help="Port: bit error rate before correction",
        unit="",
        kind="gauge",
        lines=lines,
        band=None,
        peers=0,
    )
    return replace(found, signals=(rate, *others))


def _ratio(one: Numbers, other: Numbers) -> Numbers:
    """Returns one per other, NaN where nothing was received."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (one / other).astype(np.float32)
    return np.where(np.isfinite(found), found, np.float32(np.nan)).astype(np.float32)


def convert_to_hours(signal: Compared) -> Compared:
    """Returns a counter of events as a rate per hour, in which links are judged; any other signal unchanged."""
    unit = unit_per_hour(signal.unit)
    if not unit:
        return signal

    def per_hour(values: Numbers) -> Numbers:
        return (values * np.float32(3600)).astype(np.float32)

    def maybe(values: Numbers | None) -> Numbers | None:
        return None if values is None else per_hour(values)

    lines = tuple(Line(one.entity, per_hour(one.values), maybe(one.low), maybe(one.high)) for one in signal.lines)
    band = signal.band and (per_hour(signal.band[0]), per_hour(signal.band[1]), per_hour(signal.band[2]))
    return replace(signal, unit=unit, lines=lines, band=band)


def has_errors(signal: Compared) -> bool:
    """Returns whether any line is above zero in the time range."""
    return any(bool((line.values > 0).any()) for line in signal.lines)
