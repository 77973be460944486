"""The choice of devices and signals: in the address as `?entity=&signal=`, each repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import streamlit as st

from dashboards import markup, snapshot
from dashboards.devices.html import explore_href, link
from dashboards.frame.component import Hit, parse_hits
from dashboards.time_chart.component import signal_title
from dashboards.words import unit_name
from pipeline.model.entity_names import entity_name
from pipeline.model.signals import CATALOGUE

MAX_ENTITIES, MAX_SIGNALS = 16, 8
"""Devices and signals of one page: the limits of the API."""
PEERS: Mapping[str, str] = {
    "auto": "Usual peers",
    "rack": "Same rack",
    "stage": "Same stage",
    "loop": "Same loop",
    "class": "All of its kind",
    "none": "No peers",
}
PRESETS: Mapping[str, tuple[str, ...]] = {
    "GPU heat": ("gpu.temperature", "gpu.memory_temperature", "gpu.power", "gpu.sm_clock"),
    "GPU work": ("gpu.utilization", "gpu.sm_active", "gpu.tensor_active", "gpu.memory_used"),
    "GPU memory errors": ("gpu.ecc_corrected", "gpu.ecc_uncorrected", "gpu.rows_uncorrected", "gpu.rows_pending"),
    "Link": ("nic.state", "nic.symbol_errors", "nic.rx_bytes", "nic.tx_bytes", "nic.module_temperature"),
    "Host": ("node.load1", "node.memory_available", "node.cpu_pressure", "node.io_pressure"),
    "Coolant": ("coolant.flow", "coolant.supply_temperature", "coolant.return_temperature", "coolant.pressure"),
}
"""Sets of signals by the question that they answer. Chosen."""
_ADD = "explore-add"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the address asks for. unknown: signals that do not exist."""

    entities: tuple[str, ...]
    signals: tuple[str, ...]
    peers: str
    unknown: tuple[str, ...] = ()


def read_choice() -> Choice:
    """Returns the choice in the address, at most MAX_ENTITIES and MAX_SIGNALS."""
    asked = st.query_params
    entities = tuple(dict.fromkeys(e for e in asked.get_all("entity") if 0 < e.find(":") < len(e) - 1))
    named = tuple(dict.fromkeys(asked.get_all("signal")))
    peers = asked.get("peers", "auto")
    return Choice(
        entities[:MAX_ENTITIES],
        tuple(s for s in named if s in CATALOGUE)[:MAX_SIGNALS],
        peers if peers in PEERS else "auto",
        tuple(s for s in named if s not in CATALOGUE),
    )


def draw_choice(chosen: Choice) -> None:
    """Draws the fields; each change goes into the address."""
    left, right = st.columns([1.2, 2], gap="medium")
    with left:
        st.session_state["explore-entities"] = list(chosen.entities)
        st.multiselect(
            "Devices", list(chosen.entities), key="explore-entities", format_func=entity_name,
            accept_new_options=True, max_selections=MAX_ENTITIES, on_change=_write_entities, select_all=False,
            placeholder="Name, serial number or kind:name; Enter adds it",
        )  # fmt: skip
    with right:
        st.session_state["explore-signals"] = list(chosen.signals)
        st.multiselect(
            "Signals", list(CATALOGUE), key="explore-signals", format_func=signal_label,
            max_selections=MAX_SIGNALS, on_change=_write_signals, select_all=False,
            placeholder="Type a part of a name: temperature",
        )  # fmt: skip
    row = st.container(horizontal=True, vertical_alignment="center", gap="small")
    for name, signals in PRESETS.items():
        row.button(name, key=f"preset-{name}", on_click=_write, args=("signal", list(signals)))
    st.session_state["explore-peers"] = chosen.peers
    row.selectbox(
        "Peers", list(PEERS), key="explore-peers", format_func=PEERS.__getitem__, on_change=_write_peers,
        label_visibility="collapsed", width=190,
    )  # fmt: skip
    _draw_found(chosen)


def signal_label(name: str) -> str:
    """Returns `GPU: temperature (°C), gpu.temperature`."""
    signal = CATALOGUE.get(name)
    if signal is None:
        return name
    unit = unit_name(signal.unit)
    return f"{signal_title(name, signal.help)}{f' ({unit})' if unit else ''}, {name}"


def _draw_found(chosen: Choice) -> None:
    """Draws the search results of the last text that named no device."""
    asked, found = st.session_state.get(_ADD, ("", ()))
    if not asked:
        return
    if not found:
        st.html(
            markup.notice(f"No device found for {asked!r}: expected a name, a serial number or kind:name.", "degraded")
        )
        return
    signals = list(chosen.signals)
    shown = ", ".join(link(explore_href([*chosen.entities, e], signals), entity_name(e)) for e in found)
    st.html(f'<div class="fp-notice" role="status">Several match {escape(repr(asked))}: {shown}</div>')


def _write(name: str, values: Sequence[str]) -> None:
    st.query_params[name] = list(values)
    st.session_state.pop(_ADD, None)


def _write_signals() -> None:
    _write("signal", st.session_state["explore-signals"])


def _write_peers() -> None:
    _write("peers", [st.session_state["explore-peers"]])


def _write_entities() -> None:
    """Writes the devices; a text that is no entity is searched for."""
    kept, known = [], set(st.query_params.get_all("entity"))
    pending: tuple[str, tuple[str, ...]] = ("", ())
    for text in st.session_state["explore-entities"]:
        if text in known:
            kept.append(text)
            continue
        found = find_entities(text)
        if len(found) == 1:
            kept.append(found[0])
        else:
            pending = (text, found)
    _write("entity", kept)
    if pending[0]:
        st.session_state[_ADD] = pending


def find_entities(text: str, most: int = 8) -> tuple[str, ...]:
    """Returns the devices that a text names: one if it is the name of an entity, as it is shown or stored and in any
    case, else up to `most` that match."""
    asked = text.strip().casefold()
    answer = snapshot.fetch(parse_hits, "search", q=text.strip())
    hits: Sequence[Hit] = answer.value.hits if answer.value else ()
    found = tuple(hit.id for hit in hits if hit.kind != "incident")
    exact = [e for e in found if asked in (name.casefold() for name in (e, e.partition(":")[2], entity_name(e)))]
    return tuple(exact[:1]) or found[:most]
