"""Tables of newest values: devices side by side, each value beside its peers. Cells are markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dashboards.devices.answers import ClassValues, SignalValues
from dashboards.words import age, label, quantity, reading, signal_name

MIN_PEERS = 5
"""Fewest peers whose middle 80 % a value is compared with. Chosen: as in charts."""
OF_AGENTS = ("agent.", "bmc.", "collector.", "exporter.")
"""Signals whose times are waits of any length: in ms below a second, and as an age from a minute on."""
MARGIN = 0.15
"""A value stands out if it is this share of the band's median beyond the band. Chosen: sensor noise is below it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. low_is_bad, high_is_bad: which side of the peers' band is marked."""

    signal: str
    title: str
    low_is_bad: bool = False
    high_is_bad: bool = False


def present(columns: Sequence[Column], values: ClassValues) -> list[Column]:
    """Returns the columns of which any device has a value."""
    return [c for c in columns if (s := values.signals.get(c.signal)) and any(v is not None for v in s.values)]


def text(signal: SignalValues, value: float | None) -> str:
    """Returns a value with its unit, the name of a state, or a dash."""
    if value is None:
        return "-"
    if signal.states and 0 <= int(value) < len(signal.states):
        return signal.states[int(value)]
    if signal.name == "gpu.throttle_reasons":
        return throttle_text(int(value))
    return measured(value, signal)


def measured(value: float, signal: SignalValues) -> str:
    """Returns a value with its unit; counts have none, shares are in percent, and speeds in Gbit/s."""
    if signal.unit == "Mbit/s" and abs(value) >= 1000:
        return f"{value / 1000:.3g} Gbit/s"
    if signal.unit == "s" and signal.name.startswith(OF_AGENTS):
        return (
            f"{value * 1000:.3g} ms" if 1e-3 <= abs(value) < 1 else age(value) if value >= 60 else quantity(value, "s")
        )
    return reading(value, signal.name, "" if signal.unit.startswith("{") else signal.unit)


_THROTTLE = (
    (0x8, "HW slowdown"),
    (0x40, "HW thermal"),
    (0x20, "SW thermal"),
    (0x80, "HW power brake"),
    (0x4, "SW power cap"),
    (0x10, "sync boost"),
    (0x2, "application clocks"),
    (0x1, "idle"),
)
"""Clock event reasons of NVML, those that matter first. Source: nvml.h, nvmlClocksEventReasons."""


def throttle_text(bits: int) -> str:
    """Returns the clock event reasons of NVML in words: `HW thermal, SW power cap`; `none` for 0."""
    return ", ".join(name for bit, name in _THROTTLE if bits & bit) or ("none" if not bits else f"0x{bits:x}")


def side(column: Column, signal: SignalValues, value: float | None) -> str:
    """Returns `high`, `low` or `bad` if a value stands out from its peers or is a fault, else an empty text."""
    if value is None:
        return ""
    if signal.states:
        return "bad" if signal.normal and text(signal, value) not in signal.normal else ""
    if signal.name == "gpu.throttle_reasons":
        return "bad" if int(value) & 0xE8 else ""
    if signal.median is None or signal.low is None or signal.high is None or signal.peers < MIN_PEERS:
        return ""
    margin = abs(signal.median) * MARGIN
    if column.high_is_bad and value > signal.high + margin:
        return "high"
    return "low" if column.low_is_bad and value < signal.low - margin else ""


_SIGNS = {"high": "▲ ", "low": "▼ ", "bad": "! ", "": ""}
_HINTS = {"high": "above its peers", "low": "below its peers", "bad": "not normal", "": ""}


def cell(column: Column, signal: SignalValues, value: float | None, href: str = "") -> str:
    """Returns a value, marked with a sign where it stands out; href: a chart of it."""
    found = side(column, signal, value)
    shown = f"{_SIGNS[found]}{text(signal, value)}"
    inner = f'<a class="fp-quiet" href="{escape(href)}" target="_self">{escape(shown)}</a>' if href else escape(shown)
    if not found:
        return inner
    return f'<b class="fp-outlier" title="{_HINTS[found]}">{inner}</b>'


def peers_row(columns: Sequence[Column], values: ClassValues) -> list[str]:
    """Returns the medians of the peers with their band, one cell per column."""
    found = []
    for column in columns:
        signal = values.signals[column.signal]
        if signal.median is None or signal.low is None or signal.high is None:
            found.append("")
            continue
        low, median, high = (measured(v, signal) for v in (signal.low, signal.median, signal.high))
        band = f"{low} to {high}" if signal.peers >= MIN_PEERS and low != high else ""
        found.append(f"{escape(median)}<small>{escape(band)}</small>")
    return found


def peers_title(values: ClassValues) -> str:
    """Returns the head of the row of peers: `56 peers in the rack`."""
    known = max((s for s in values.signals.values()), key=lambda s: s.peers, default=None)
    if known is None or not known.peers:
        return "No peers"
    where = "on other nodes of the group" if known.peer_kind == "group" else "of its kind on other nodes"
    return f"{known.peers:,} peers {where}"


def title_of(signal: SignalValues) -> str:
    """Returns a signal's name in words; its unit stands at the value."""
    return label(signal_name(signal.name))
