"""Tables of a node's devices: GPUs side by side, ports, power supplies, collectors, and generic newest values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from dashboards.devices import cells, html
from dashboards.devices.answers import ClassValues, EntityDetail, Values
from dashboards.devices.cells import Column
from dashboards.devices.html import entity_link, explore_href, link
from dashboards.time_chart.component import short_name
from dashboards.words import age, ago, quantity, silence
from pipeline.model.signals import class_of_entity

GPU_COLUMNS = (
    Column("gpu.temperature", "Core", high_is_bad=True),
    Column("gpu.memory_temperature", "Memory", high_is_bad=True),
    Column("gpu.power", "Power", low_is_bad=True, high_is_bad=True),
    Column("gpu.sm_clock", "SM clock", low_is_bad=True),
    Column("gpu.utilization", "Utilization", low_is_bad=True),
    Column("gpu.memory_used", "Memory used"),
    Column("gpu.ecc_uncorrected", "ECC uncorr."),
    Column("gpu.rows_pending", "Row remap"),
    Column("gpu.throttle_reasons", "Throttle"),
    Column("gpu.recovery_action", "Recovery action"),
)
PORT_COLUMNS = (
    Column("nic.state", "State"),
    Column("nic.speed", "Speed", low_is_bad=True),
    Column("nic.module_temperature", "Module", high_is_bad=True),
    Column("nic.rx_power_min", "Rx power", low_is_bad=True),
    Column("nic.tx_power_min", "Tx power", low_is_bad=True),
    Column("nic.carrier_downs", "Link downs"),
    Column("nic.symbol_errors", "Symbol errors"),
)
PSU_COLUMNS = (
    Column("psu.input_power", "Input"),
    Column("psu.output_power", "Output"),
    Column("psu.input_voltage", "Input voltage"),
    Column("psu.temperature", "Temperature", high_is_bad=True),
    Column("psu.input_status", "Input state"),
    Column("psu.status", "State"),
)
COLLECTOR_COLUMNS = (
    Column("collector.state", "State"),
    Column("collector.latency", "Latency"),
    Column("collector.silence", "Silent for"),
)
NODE_SIGNALS = (
    "node.power", "node.load1", "node.memory_available", "node.memory_total", "node.uptime", "node.clock_offset",
    "node.clock_synchronized", "node.chassis_faults", "node.gpu_expected", "node.gpu_driver",
)  # fmt: skip
HEALTH = {"bmc": "BMC", "agent": "Agent", "exporter": "Exporter", "leak": "Leak detector"}
"""Classes of what reads and guards the node -> name, in this order."""
HEALTH_SIGNALS = (
    "bmc.reachable", "bmc.latency", "agent.unsent", "agent.spool_bytes", "agent.spool_wait", "agent.dropped",
    "agent.memory", "exporter.up", "exporter.scrape_time", "leak.state",
)  # fmt: skip
OTHER_SIGNALS = (
    *HEALTH_SIGNALS, "sensor.temperature", "sensor.fan_speed", "nvlink.state", "neuroncore.utilization",
    "gpu.power_limit", "gpu.pcie_width", "gpu.pcie_generation", "gpu.rows_failed", "gpu.present",
    "disk.state", "filesystem.mounted", "dimm.corrected", "service.state",
)  # fmt: skip
COLUMNS = (*GPU_COLUMNS, *PORT_COLUMNS, *PSU_COLUMNS, *COLLECTOR_COLUMNS)
SIGNALS = (*(column.signal for column in COLUMNS), *NODE_SIGNALS, *OTHER_SIGNALS)


def describe_silence(values: Values | None, entity: str) -> str:
    """Returns for how long a device has sent no data, empty if it sends some or the answer says nothing about it.

    Classes that are read more rarely than once in SILENT_S, such as batteries, are not in SIGNALS.
    """
    own = None if values is None else values.classes.get(class_of_entity(entity))
    if values is None or own is None or (entity not in own.entities and own.left_out):
        return ""
    seen = own.last_seen[own.entities.index(entity)] if entity in own.entities else None
    return silence(seen, values.as_of)


def device_table(
    values: ClassValues, columns: Sequence[Column], name: str, now: int, focus: str = "", extra: Mapping[str, str] = {}
) -> str:
    """Returns the devices of a class, one per row, and their peers in the last. extra: markup of a last column."""
    shown = cells.present(columns, values)
    rows = [_row(values, shown, i, now, focus, extra) for i in range(len(values.entities))]
    peers = cells.peers_row(shown, values)
    if any(peers):
        rows.append([f"<i>{escape(cells.peers_title(values))}</i>", *peers, *([""] if extra else [])])
    head = [name, *(column.title for column in shown), *(["Far end"] if extra else [])]
    several = name.removesuffix("y") + "ies" if name.endswith("y") else f"{name}s"
    return html.table(head, rows, f"No {several.lower()} known.", "fp-devices")


def _row(
    values: ClassValues, shown: Sequence[Column], i: int, now: int, focus: str, extra: Mapping[str, str]
) -> list[str]:
    entity = values.entities[i]
    head = entity_link(entity, short_name(entity))
    if entity == focus:
        head = f'<b class="fp-focus">{head}</b>'
    seen = values.last_seen[i]
    silent = silence(seen, now)
    if silent:
        since = silent if seen is None else f"last known, {silent}"
        head += f' <span class="fp-silent">{escape(since)}</span>'
    found = [
        cells.cell(
            column,
            values.signals[column.signal],
            values.signals[column.signal].values[i],
            explore_href([entity], [column.signal]),
        )
        for column in shown
    ]
    if silent:
        found = [f'<span class="fp-old">{one}</span>' for one in found]
    return [head, *found, *([extra.get(entity, "")] if extra else [])]


def far_ends(detail: EntityDetail) -> dict[str, str]:
    """Returns port -> link to its far end, or that it is not monitored."""
    found = {}
    for part in detail.parts_of_kind("port"):
        peer = detail.links.get(part.entity)
        leaf = next((p for p in part.parents if p.partition(":")[0] == "leaf"), None)
        said = part.attributes.get("peer_name") or part.attributes.get("peer_guid")
        if peer:
            found[part.entity] = entity_link(peer)
        elif leaf:
            found[part.entity] = f"{entity_link(leaf)}, far end not monitored"
        else:
            found[part.entity] = escape(f"{said}, not monitored" if said else "far end not monitored")
    return found


def focus_rows(values: Values, focus: str, detail: EntityDetail) -> list[tuple[str, str]]:
    """Returns (label, value as markup) of the newest values of one device beside its peers."""
    found = []
    for one in values.classes.values():
        if focus not in one.entities:
            continue
        for name, signal in one.signals.items():
            value = one.value(name, focus)
            if value is None:
                continue
            beside = "" if signal.median is None else f" (peers {cells.measured(signal.median, signal)})"
            column = next((c for c in COLUMNS if c.signal == name), Column(name, name))
            chart = explore_href([focus], [name])
            found.append((cells.title_of(signal), cells.cell(column, signal, value, chart) + escape(beside)))
    return found


def health_rows(values: Values, now: int) -> list[tuple[str, str]]:
    """Returns (device, values as markup) of the BMC, the agent, its exporters and the leak detectors of a node."""
    found = []
    for device_class, name in HEALTH.items():
        own = values.of_class(device_class)
        for i, entity in enumerate(own.entities):
            texts = []
            for signal_name in HEALTH_SIGNALS:
                signal = own.signals.get(signal_name)
                if signal is None or signal.values[i] is None:
                    continue
                column, chart = Column(signal_name, signal_name), explore_href([entity], [signal_name])
                text = cells.cell(column, signal, signal.values[i], chart)
                texts.append(f"{escape(cells.title_of(signal).lower())} {text}")
            if since := silence(own.last_seen[i], now):
                texts = [f'<span class="fp-silent">{escape(since)}</span>', *texts[:1]]
            same = len(own.entities) == 1
            found.append((name if same else f"{name} {short_name(entity)}", ", ".join(texts) or "no value"))
    return found


def clock_text(synchronized: bool, keeper: str) -> str:
    """Returns the state of a node's clock in words. keeper: the service that reported how it steers it, if any."""
    if synchronized:
        return f"synchronized by {keeper}" if keeper else "synchronized"
    return f"not synchronized, although {keeper} runs" if keeper else "not synchronized by NTP or PTP"


def node_rows(values: Values, now: int, keeper: str = "") -> list[tuple[str, str]]:
    """Returns (label, value as markup) of the node itself: power, load, memory, clock, GPUs expected and found.

    keeper: the service that keeps its clock, if that is known.
    """
    own = values.of_class("node")
    if not own.entities:
        return []
    node, found = own.entities[0], []
    for name in NODE_SIGNALS:
        signal = own.signals.get(name)
        value = own.value(name, node)
        if signal is None or value is None or name == "node.memory_total":
            continue
        shown = age(value) if name == "node.uptime" else cells.text(signal, value)
        if name == "node.memory_available" and (total := own.value("node.memory_total", node)):
            shown += f" of {quantity(total, 'By')}"
        label = cells.title_of(signal)
        if name == "node.clock_synchronized":
            label, shown = "Clock", clock_text(value > 0, keeper)
        found.append((label, link(explore_href([node], [name]), shown)))
    seen = own.last_seen[0]
    found.append(("Last data", escape("never" if seen is None else ago(seen, now))))
    return found
