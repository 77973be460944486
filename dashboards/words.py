"""Text on the pages: names, ages, times, figures with units, and recommended actions. Plain text, no markup."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from pipeline.model.entity_names import KINDS, entity_name
from pipeline.model.records import SECOND, Severity, State, from_iso, iso
from pipeline.model.signals import CATALOGUE

SEVERITY: Mapping[Severity, str] = {"page": "CRITICAL", "ticket": "WARNING", "watch": "WATCH"}
STATE: Mapping[State, str] = {
    "open": "Open",
    "acknowledged": "Acknowledged",
    "silenced": "Silenced",
    "resolved": "Resolved",
}
SILENT_S = 60.0
"""Age of the newest data from which a device or unit is silent (s). Source: the API's state `no_data` of a node."""
NODE_STATE = {"critical": "critical", "degraded": "degraded", "watch": "watch", "no_data": "no data", "ok": "ok"}
_ENTITY = re.compile(rf"\b(?:{'|'.join(KINDS)}):[\w-]+(?:\.[\w/@-]+)*")
_ACRONYMS = {"gpu": "GPU", "gpus": "GPUs", "sm": "SM", "nic": "NIC", "ecc": "ECC", "crc": "CRC", "pcie": "PCIe"}
_LABELS = {
    "value": "Measured",
    "expected": "Expected",
    "slowdown": "Slowdown factor",
    "peers": "Peers compared",
    "mismatches": "Checks with a wrong result",
    "reproduced": "Retests of them, wrong again",
    "right_rounds": "Checks and retests with a right result",
    "right_running": "Right results since the last wrong one",
    "odds": "Odds of a defect",
    "holds": "Active until a clean retest or a reset",
    "corroborated_by": "Corroborated by",
    "down_s": "Down for",
    "flaps": "Flaps",
    "load1": "Load, 1 min",
    "gpu expected": "GPUs expected",
    "gpu driver": "GPUs of the driver",
    "heat_kw": "Heat carried",
    "heat_share": "Heat carried, of the power of the GPUs",
    "power_share": "Power, of the usual",
    "doubted": "Measurement in doubt",
    "meter_doubted": "Meter in doubt",
    "rows_pending": "Row remap waits for a reset",
    "rows pending": "Row remap waits for a reset",
    "rows_failed": "Row remap failed",
    "rows failed": "Row remap failed",
}
_UNITS = {"Cel": "°C", "By": "B", "By/s": "B/s", "1": "", "share": "", "decade": "decades", "us": "µs"}
_MOST_SHARE = 10
"""Highest valid value of a signal that is a share: a load may exceed its limit. Chosen: as in the catalogue."""
_BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def counted(kinds: Mapping[str, int]) -> list[str]:
    """Returns numbers by kind, the largest last: `1 node`, `8 GPUs`."""
    ordered = sorted(kinds.items(), key=lambda pair: (pair[1], pair[0]))
    return [amount(number, *KINDS.get(kind, (kind, kind))) for kind, number in ordered]


def amount(number: int, one: str, many: str) -> str:
    """Returns a number with its noun: `1 node`, `1,024 nodes`."""
    return f"{number:,} {one if number == 1 else many}"


def age(seconds: float) -> str:
    """Returns a duration in at most two units: `4 s`, `12 min`, `2 h 05 min`, `3 d 4 h`; negative ones are `0 s`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


_ZONE: ContextVar[tzinfo] = ContextVar("zone", default=UTC)
"""Zone of the times of the page that runs in this thread."""


def zone_offset_s(time: int) -> int:
    """Returns how far the zone of this run is ahead of UTC at a time (s)."""
    return int((datetime.fromtimestamp(time / SECOND, _ZONE.get()).utcoffset() or timedelta()).total_seconds())


def zone_name(time: int) -> str:
    """Returns the name of the zone of this run: `UTC`, or such as `JST`."""
    return datetime.fromtimestamp(time // SECOND, _ZONE.get()).tzname() or "UTC"


def chart_time(time: int) -> int:
    """Returns a time in ms for a chart in UTC that shows the clock of the zone of this run."""
    return time // 1000 + zone_offset_s(time) * 1000


def axis_label() -> str:
    """Returns the Vega expression of a time's label: with Z in UTC, as it is in local time."""
    return "datum.label + 'Z'" if _ZONE.get() is UTC else "datum.label"


def set_zone(zone: tzinfo) -> None:
    """Sets the zone of all times that this run of a page shows."""
    _ZONE.set(zone)


def clock(time: int, now: int) -> str:
    """Returns a time such as `11:43:02Z`, or `12:43:02 CET` in local time; with the date unless it is today."""
    moment, today = (datetime.fromtimestamp(t // SECOND, _ZONE.get()) for t in (time, now))
    return dated(time).partition(" ")[2] if moment.date() == today.date() else dated(time)


def dated(time: int) -> str:
    """Returns a time with its date: `2026-01-31 11:43:02Z`, or `2026-01-31 12:43:02 CET` in local time."""
    moment = datetime.fromtimestamp(time // SECOND, _ZONE.get())
    zone = "Z" if moment.tzinfo is UTC else f" {moment.tzname()}"
    return f"{moment:%Y-%m-%d %H:%M:%S}{zone}"


def are_today(times: Iterable[int], now: int) -> bool:
    """Returns whether all times are on the day of now, so that they can be shown without a date."""
    return {dated(time)[:10] for time in times} <= {dated(now)[:10]}


def ago(time: int, now: int) -> str:
    """Returns a time with its age: `11:43:02Z (12 min ago)`."""
    return f"{clock(time, now)} ({age((now - time) / SECOND)} ago)"


def silence(seen: int | None, now: int) -> str:
    """Returns for how long there is no data, empty while the newest is not older than SILENT_S. seen: its time."""
    if seen is None:
        return "no data yet"
    silent_s = (now - seen) / SECOND
    return f"no data for {age(silent_s)}" if silent_s > SILENT_S else ""


def quantity(value: float, unit: str = "") -> str:
    """Returns a number with three significant digits, or all digits of an integer, and its unit."""
    unit_text = "" if unit.startswith("{") and unit.endswith("}") else unit_name(unit)
    tail = f" {unit_text}" if unit_text else ""
    if not math.isfinite(value):
        return "not measured"
    for scale, prefix in _BIG:
        if abs(value) >= scale and unit in ("By", "B", "Hz", "W", "", "By/s"):
            return f"{value / scale:.3g} {prefix}{unit_text.replace('By', 'B')}"
    if unit == "s" and 0 < abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}{tail}"
    return f"{value:,.0f}{tail}" if abs(value) >= 100 else f"{value:.3g}{tail}"


def unit_name(unit: str) -> str:
    """Returns the common form of a UCUM unit: `Cel` -> `°C`, `{error}` -> `error`, `1` -> ``."""
    return _UNITS.get(unit, unit.replace("{", "").replace("}", ""))


def is_share(signal: str) -> bool:
    """Returns whether a signal is a share, which pages show in percent: a utilization or load, but no error rate."""
    known = CATALOGUE.get(signal)
    if known is None or known.unit != "1" or known.kind != "gauge" or known.states:
        return False
    low, high = known.valid
    return low == 0 and high <= _MOST_SHARE and not known.name.endswith("_ber")


def reading(value: float, signal: str, unit: str) -> str:
    """Returns a value of a signal with its unit; shares are in percent."""
    return f"{100 * value:.3g} %" if is_share(signal) and math.isfinite(value) else quantity(value, unit)


def percent(share: float) -> str:
    """Returns a share in whole percent, `under 1 %` for small ones."""
    return "under 1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def with_entity_names(text: str) -> str:
    """Returns text with `kind:name` replaced by names and Cel by °C."""
    return _ENTITY.sub(lambda found: entity_name(found[0]), text.strip()).replace(" Cel", " °C")


def signal_name(name: str) -> str:
    """Returns a signal's name in words: `coolant.supply_temperature` -> `supply temperature`."""
    known = CATALOGUE.get(name)
    return known.column.replace("_", " ") if known else name


def detector_name(name: str) -> str:
    """Returns the detector's name; `all detectors` for `*`."""
    return "all detectors" if name == "*" else name


def scope_name(scope: str) -> str:
    """Returns the name of a mute's or mode's scope; `everywhere` for `*`."""
    return "everywhere" if scope == "*" else entity_name(scope)


_COUNT = re.compile(
    r"(?<![\w.,:/-])(?<!job )(?<!rank )(?<!step )\d{4,}"
    r"(?= (?:of \d|(?:[A-Za-z]+ )?(?:errors|recoveries|nodes|GPUs|ranks|ports|links|devices|messages|samples)\b))"
)
"""A number of things in a summary, whose detectors write it without separators; no part of a name."""


def plain(text: str) -> str:
    """Returns a summary with entity names, units, separators of thousands and a capital letter, unless it starts with a
    name such as `n42`."""
    text = _COUNT.sub(lambda found: f"{int(found[0]):,}", with_entity_names(text))
    return text[:1].upper() + text[1:] if text.partition(" ")[0].rstrip(":,").isalpha() else text


def label(key: str) -> str:
    """Returns the label of an evidence field: `supply_temperature` -> `Supply temperature`."""
    if key in _LABELS:
        return _LABELS[key]
    parts = key.removesuffix("_s").replace(".", " ").replace("_", " ").split()
    text = " ".join(_ACRONYMS.get(part, part) for part in parts)
    return text[:1].upper() + text[1:]


def fact(value: Any, unit: str = "") -> str:
    """Returns the value of an evidence field as text."""
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return quantity(float(value), unit)
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{label(str(k)).lower()} {fact(v)}" for k, v in value.items() if v not in ("", None)) or "none"
        )
    if isinstance(value, (list, tuple)):
        shown = ", ".join(fact(v) for v in value[:8])  # eight fit in a line of the table
        return shown + (f" and {len(value) - 8:,} more" if len(value) > 8 else "") if value else "none"
    return _text(str(value)) or "none"


def _text(text: str) -> str:
    """Returns the name of an entity, a time without fractions, and any other text unchanged."""
    if _ENTITY.fullmatch(text):
        return entity_name(text)
    try:
        return f"{iso(from_iso(text))[:19].replace('T', ' ')}Z" if len(text) == 27 else text
    except ValueError:
        return text


def joined(parts: Sequence[str]) -> str:
    """Returns a list in words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


ACTIONS: Mapping[str, str] = {
    "straggler": (
        "The whole job waits for {entity}. Compare clocks, throttle reasons and temperature with its peers. "
        "If it stays slow, move its rank to a spare node."
    ),
    "straggler_job": (
        "All ranks of {entity} are slow together. Check storage, the data loader, network congestion and recent "
        "changes to the job before you suspect a device."
    ),
    "link": (
        "Inspect both ends of {entity}: reseat and clean first, then replace cable or transceiver. "
        "Until then, every collective over this link can be slow."
    ),
    "link_stall": (
        "{entity} is up, but moves no data. Check the process and the NIC driver on the node, flow control (PFC) on "
        "the switch port, and the other end of the link."
    ),
    "link_optic": (
        "Clean and reseat the transceiver of {entity}. Replace it if optical power, bias current or temperature stay "
        "outside the limits."
    ),
    "link_congestion": (
        "Find the jobs that share {entity}. Check routing, adaptive routing and flow control settings, and receivers "
        "that are slow. The cable is rarely the reason."
    ),
    "link_nvlink": (
        "Stop new jobs on the node. Run the vendor's NVLink diagnostics on {entity}; reset the GPU, and replace GPU or "
        "baseboard if errors return."
    ),
    "link_pcie": (
        "Check the PCIe link of {entity}: width, speed and errors on both ends. Reseat the device or riser when the "
        "node is free; replace it if errors return."
    ),
    "sdc": (
        "Do not trust results of {entity} since they are in doubt (see impact), which is before the onset. Take it out "
        "of new jobs, repeat the check on it and on a peer, and find the checkpoints that were written since."
    ),
    "sdc_gradient": (
        "Compare loss and gradients of the ranks around the onset, and go back to the last checkpoint from before "
        "results are in doubt (see impact). Run the canaries on {entity} before it takes part again."
    ),
    "xid": (
        "Look up the XID in the evidence. Drain the node of {entity}, then reset the GPU or reboot the node as the "
        "XID demands. If it returns after a reset, run the field diagnostics and open a case with the vendor."
    ),
    "memory": (
        "Drain the node of {entity} at the next opportunity and reset it, so that pending row remaps or page offlines "
        "take effect. Replace the part if uncorrectable errors return or remapping fails."
    ),
    "power": (
        "Check power supplies, feeds and power limits of {entity}, and the load of its PDU. "
        "Move jobs away if redundancy is lost."
    ),
    "host": (
        "Drain the node of {entity} before the time left is over, or move its job. Memory: find the process that "
        "grows. File system: remove old files. Disk: save its data and plan a replacement."
    ),
    "coolant": (
        "Send a technician to {entity}: check pump, valves and filter. GPUs behind it throttle next. "
        "Move jobs away before they do."
    ),
    "coolant_leak": (
        "Send a technician to {entity} now. Stop the jobs there, close the loop and cut the power as your site's leak "
        "procedure demands. Clear the incident only after an inspection."
    ),
    "thermal": (
        "Check the cooling of {entity}: coolant flow and supply temperature, fans, inlet temperature, cold plate and "
        "thermal paste. If only this device is hot, move its jobs and service it."
    ),
    "thermal_inlet": (
        "Check the room cooling and the air flow at {entity}: blocked inlets, missing blanking panels, failed fans or "
        "air handlers."
    ),
    "telemetry": (
        "Check whether {entity} runs and is reachable. If it runs, check the agent: `systemctl status "
        "fleetpulse-agent` and `fleetpulse doctor` on the node."
    ),
    "telemetry_sensor": (
        "Do not act on the values of this sensor of {entity}. Compare them with the BMC, then reset the BMC or replace "
        "the sensor."
    ),
    "telemetry_clock": (
        "Check time synchronization of {entity}: `timedatectl` and `chronyc sources`. Wrong times shift its data "
        "against all others."
    ),
    "telemetry_blind": (
        "Run `fleetpulse doctor` on {entity}: a collector reads nothing. Check drivers, permissions and versions "
        "after the last upgrade. If a detector fails, send the error in the pipeline's log to its developers: until it "
        "works again, its faults are not found."
    ),
    "telemetry_site": (
        "Check the network to {entity}, the brokers and the last rollout of agents. Faults there are invisible until "
        "data arrives again."
    ),
    "anomaly": (
        "This is an unusual change without a known meaning. Compare {entity} with its peers in the chart and look for "
        "a change at the onset in the timeline. If it is normal, mark it as normal."
    ),
}
"""Detector or family (the name up to the first underscore) -> text; the detector's own entry comes first."""
GENERAL = "Compare {entity} with its peers in the chart, and write a comment with your findings."


def recommended_action(detector: str, entity: str) -> str:
    """Returns what to do next about `entity`, the suspected cause."""
    text = ACTIONS.get(detector) or ACTIONS.get(detector.partition("_")[0], GENERAL)
    return text.format(entity=entity_name(entity))
