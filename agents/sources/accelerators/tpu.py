"""What libtpu's metric service says (tpu.monitoring.runtime, tpu_metric_service.proto of Google's tpu-info)."""

from __future__ import annotations

from collections.abc import Callable

from agents.sources.accelerators.columns import text as printable
from agents.sources.protobuf import Message, text

SERVICE = "/tpu.monitoring.runtime.RuntimeMetricService"
TOTAL = "tpu.runtime.hbm.memory.total.bytes"
USED = "tpu.runtime.hbm.memory.usage.bytes"
DUTY = "tpu.runtime.tensorcore.dutycycle.percent"
QUEUE = "hlo.queue.size.gauge"
SIGNALS = {TOTAL: "gpu.memory_total", USED: "gpu.memory_used", DUTY: "gpu.utilization", QUEUE: "gpu.queued_programs"}
MOST_BYTES = 256 * 1024
"""Longest answer that is taken; chosen: a host has up to 8 chips, whose metric takes some 100 bytes each."""
MOST_DEVICES = 64
"""Most devices of one host."""
_MOST_NUMBER = 2**20

Ask = Callable[[str, bytes], bytes]


def metric(ask: Ask, name: str) -> dict[int, float]:
    """Device number -> value of one metric. Raises Malformed for what is no answer."""
    answer = Message(ask(f"{SERVICE}/GetRuntimeMetric", text(1, name)))
    found: dict[int, float] = {}
    for one in answer.message(1).messages(3):  # MetricResponse.metric.metrics
        device = _device(one.message(1))
        value = _value(one.message(3))
        if device is not None and value is not None and len(found) < MOST_DEVICES:
            found[device] = value
    return found


def supported(ask: Ask) -> list[str]:
    """Names of the metrics that this libtpu has."""
    answer = Message(ask(f"{SERVICE}/ListSupportedMetrics", b""))
    return [printable(one.text(1)) for one in answer.messages(1)[:1024]]


def by_signal(found: dict[str, dict[int, float]]) -> dict[int, dict[str, float]]:
    """Device -> signals. The duty cycle is of a chip, which has two devices on v2, v3 and 7x: both get it."""
    memory = sorted({*found.get(TOTAL, {}), *found.get(USED, {})})
    duty = found.get(DUTY, {})
    if duty and len(memory) == 2 * len(duty):
        per_chip = [duty[chip] for chip in sorted(duty)]
        found = found | {DUTY: {device: per_chip[place // 2] for place, device in enumerate(memory)}}
    devices: dict[int, dict[str, float]] = {}
    for name, values in found.items():
        for device, value in values.items():
            devices.setdefault(device, {})[SIGNALS[name]] = value / 100 if name == DUTY else value
    return devices


def _device(attribute: Message) -> int | None:
    """The number stands alone (memory, duty cycle), or in a list under `device_ordinal`, in newer ones as a text."""
    value = attribute.message(2)
    for one in value.message(6).messages(1)[:16]:
        if one.text(1) == "device_ordinal":
            value = one.message(2)
            break
    word = value.text(1)
    number = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else value.signed(3)
    return number if 0 <= number < _MOST_NUMBER else None


def _value(gauge: Message) -> float | None:
    if gauge.has(1):
        return gauge.double(1)
    return float(gauge.signed(2)) if gauge.has(2) else None
