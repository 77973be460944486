"""Charts of signals over one time axis: panels of lines beside the band of their peers, or a grid of small ones.

The script receives values as bytes. A drag, `+` or `-` on a chart asks for another time range.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import streamlit as st

from dashboards import snapshot, theme
from dashboards.devices.answers import Compared, Comparison, Line, Numbers
from dashboards.theme import DARK, LIGHT, SERIES
from dashboards.words import amount, are_today, dated, is_share, label, quantity, reading, unit_name, zone_offset_s
from pipeline.model.entity_names import entity_name
from pipeline.model.signals import CATALOGUE

MIN_BAND_PEERS = 5
"""Fewest peers for which a band of 80 % is drawn; with fewer, the median is enough. Chosen."""
HINT = "Point at a chart for values; click to keep them, drag across it to zoom. Keys: arrows, +, - and Escape."
_HERE = Path(__file__).parent
_charts = st.components.v2.component(
    "fleetpulse.time_chart",
    html='<div class="charts"></div>',
    css=theme.css_variables(":host") + (_HERE / "time_chart.css").read_text(),
    js=(_HERE / "time_chart.js").read_text(),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, or with `end` a span, in all charts. tone: a colour of the palette. Times are UTC us."""

    time: int
    text: str
    tone: str = "muted"
    href: str = ""
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """How charts are drawn. own: entities whose lines are drawn as the device. hrefs: (entity, signal) -> address.

    outliers: (entity, signal) of cells that differ from their peers.  stale: older than it should be.
    """

    height: int = 170
    own: frozenset[str] = frozenset()
    stale: bool = False
    hrefs: Mapping[tuple[str, str], str] | None = None
    outliers: frozenset[tuple[str, str]] = frozenset()
    layout: Literal["stack", "two", "grid"] = "stack"


def time_charts(found: Comparison, marks: Sequence[Mark], look: Look, key: str) -> tuple[int, int] | None:
    """Draws one chart per signal; returns the chosen time range (UTC us), None if there is no new one."""
    chosen = _charts(key=key, data=chart_data(found, marks, look), on_range_change=lambda: None).range
    if not isinstance(chosen, (list, tuple)) or len(chosen) != 2:
        return None
    return int(chosen[0]) * 1000, int(chosen[1]) * 1000


def chart_data(found: Comparison, marks: Sequence[Mark], look: Look) -> dict[str, Any]:
    """Returns the data of the script. Times are in ms; looks belong to entities, over all charts."""
    entities = list(dict.fromkeys(line.entity for signal in found.signals for line in signal.lines))
    looks = choose_looks(entities, look.own)
    return {
        "start": found.start // 1000,
        "end": found.end // 1000,
        "layout": look.layout,
        "dated": not are_today((found.start, found.end), snapshot.now()),
        "ahead": zone_offset_s(found.end) * 1000,
        "columns": [short_name(e) for e in entities] if look.layout == "grid" else [],
        "hint": HINT,
        "dashes": DASHES,
        "stale": look.stale,
        "panels": [_panel(signal, looks, look, found.end) for signal in found.signals],
        "marks": [
            {
                "time": m.time // 1000,
                "end": None if m.end is None else m.end // 1000,
                "text": m.text,
                "tone": m.tone.replace("_", "-"),
                "href": m.href,
            }
            for m in marks
            if (m.end or m.time) >= found.start and m.time < found.end
        ],
    }


DASHES: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 3), (10, 3, 2, 3))
"""Lines and gaps (px) of the looks of one colour. Chosen: with 8 colours no two of the 16 lines of a chart are alike,
whatever else the page shows."""
_BAND = ("median", "low", "high")


def choose_looks(entities: Sequence[str], own: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Returns colour (of SERIES) and dash of each entity's lines. Lines beside an own one never have its colour."""
    free = [i for i, colour in enumerate(SERIES) if not own or colour != (LIGHT.device, DARK.device)]
    others = [entity for entity in entities if entity not in own]
    looks = {e: (free[i % len(free)], i // len(free) % len(DASHES)) for i, e in enumerate(others)}
    return {**dict.fromkeys(own, (0, 0)), **looks}


def _panel(signal: Compared, looks: Mapping[str, tuple[int, int]], look: Look, end: int) -> dict[str, Any]:
    band = signal.band
    return {
        "title": signal_title(signal.name, signal.help),
        "unit": "" if signal.unit.startswith("{") and "/" not in signal.unit else _unit(signal),
        "note": resolution(signal) if look.layout != "grid" else _unit(signal),
        "height": look.height,
        "states": list(signal.states),
        "start": signal.start // 1000,
        "step": signal.width * 1000,
        "peers": peers_name(signal),
        "band_drawn": signal.peers >= MIN_BAND_PEERS,
        "empty": "No data in this time range.",
        "label": describe(signal, end),
        "end": end // 1000,
        "lines": [_line(line, signal, looks, look) for line in signal.lines],
        "band": None if band is None else {n: _bytes(v, signal) for n, v in zip(_BAND, band, strict=True)},
    }


def _unit(signal: Compared) -> str:
    return "%" if is_share(signal.name) else unit_name(signal.unit)


def _line(line: Line, signal: Compared, looks: Mapping[str, tuple[int, int]], look: Look) -> dict[str, Any]:
    about = (line.entity, signal.name)
    return {
        "name": entity_name(line.entity),
        "short": short_name(line.entity),
        "colour": looks[line.entity][0],
        "dash": looks[line.entity][1],
        "own": line.entity in look.own,
        "outlier": about in look.outliers,
        "href": (look.hrefs or {}).get(about, ""),
        "label": _summary(line, signal),
        "values": _bytes(line.values, signal),
        "low": _bytes(line.low, signal) if line.low is not None else None,
        "high": _bytes(line.high, signal) if line.high is not None else None,
    }


def _bytes(values: Numbers, signal: Compared) -> str:
    """Returns the values as the script reads them; shares in percent."""
    drawn = values * 100 if is_share(signal.name) else values
    return base64.b64encode(np.asarray(drawn, "<f4").tobytes()).decode()


def signal_title(name: str, help_: str) -> str:
    """Returns the heading of a chart: the signal's class and name in words, `GPU: memory temperature`."""
    known = CATALOGUE.get(name)
    if known is None:
        return help_ or name
    words = label(known.column)
    words = words if words[1:2].isupper() else words[:1].lower() + words[1:]
    return f"{CLASS_NAMES.get(known.device_class, known.device_class)}: {words}"


CLASS_NAMES: Mapping[str, str] = {
    "gpu": "GPU",
    "nic": "Port",
    "nvlink": "NVLink",
    "node": "Node",
    "psu": "Power supply",
    "power": "Power",
    "coolant": "Coolant",
    "rank": "Rank",
    "sensor": "Sensor",
    "bmc": "BMC",
    "dimm": "Memory module",
    "disk": "Disk",
    "filesystem": "File system",
    "agent": "Agent",
    "collector": "Collector",
    "exporter": "Exporter",
    "service": "Service",
    "battery": "Battery",
    "leak": "Leak detector",
    "neuroncore": "NeuronCore",
    "canary": "Canary",
    "custom": "Custom",
}


def resolution(signal: Compared) -> str:
    """Returns unit, resolution and source: `°C, one point per 72 s, from rollups of 60 s`."""
    source = f"from rollups of {signal.step} s" if signal.step else "from all samples"
    unit = _unit(signal)
    rate = "rate, " if signal.kind == "counter" else ""
    more = f", {signal.left_out:,} more devices not drawn" if signal.left_out else ""
    return f"{unit + ', ' if unit else ''}{rate}one point per {quantity(signal.width, 's')}, {source}{more}"


def peers_name(signal: Compared) -> str:
    """Returns the legend of the band: `median (80 % band) of 56 peers in the same rack`."""
    where = {"": "", "class": " of its kind"}.get(signal.peer_kind, f" in the same {signal.peer_kind}")
    several = "median (80 % band)" if signal.peers >= MIN_BAND_PEERS else "median"
    return f"{several} of {amount(signal.peers, 'peer', 'peers')}{where}"


def short_name(entity: str) -> str:
    """Returns the last part of a name: `GPU 3` of `gpu:n042.3`, `mlx5_0` of a port."""
    kind, _, name = entity.partition(":")
    part = name.partition(".")[2] or name
    return f"GPU {part}" if kind == "gpu" else part


def describe(signal: Compared, end: int) -> str:
    """Returns a chart up to `end` (UTC us) in one sentence, for those who cannot see it."""
    lines = "; ".join(_summary(line, signal) for line in signal.lines[:8])
    span = f"{dated(signal.start)} to {dated(end)}"
    return f"{signal_title(signal.name, signal.help)}, {span}: {lines or 'no data'}"


def _summary(line: Line, signal: Compared) -> str:
    known = line.values[np.isfinite(line.values)]
    if not len(known):
        return f"{entity_name(line.entity)} no data"
    low, high, last = (reading(float(v), signal.name, signal.unit) for v in (known.min(), known.max(), known[-1]))
    return f"{entity_name(line.entity)} {low} to {high}, last {last}"
