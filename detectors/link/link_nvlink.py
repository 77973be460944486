"""Finds NVLinks that have errors, lose speed or go down, and the faulty end of a link if it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import events_of, read_integer, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import SETTLES, Gates
from detectors.base.streams import LEARN
from detectors.link.alarm_rates import RULE, describe_cusum_rate
from detectors.link.poisson_cusum import PoissonCusum
from pipeline.model.compiling import compiled
from pipeline.model.entity_names import pager_title, short_number
from pipeline.model.records import SECOND, Event, Finding, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
DriverMessages = dict[str, dict[str, Any]]
COUNTERS = tuple(
    f"nvlink.{name}"
    for name in (
        *("crc_errors", "replay_errors", "recovery_errors", "recoveries", "recoveries_failed", "effective_errors"),
        *("rx_errors", "malformed_packets", "buffer_overruns", "integrity_errors"),
    )
)
LINK_STATE = np.dtype(
    [
        ("count", "<i4"),  # samples of its state or speed
        ("was_up", "?"),
        ("best", "<f4"),  # highest speed that it has held for some samples
        ("low", "<i2"),  # samples in a row in which it was down or slower than that
        ("since", "<i8"),  # when that began
        ("held", "<i2"),  # samples in a row at the speed of `newest`
        ("newest", "<f4"),
    ]
)
NVLINK_XIDS = frozenset({74, 136, *range(144, 151)})
"""XIDs of NVLinks by NVIDIA's catalogue: 74 and 136 to Hopper, 144 to 150 on Blackwell."""
MESSAGE_LIFETIME = 900 * SECOND
"""us for which a message alone keeps a finding open; chosen: a driver repeats itself within that."""
_LINKS_PER_NODE = 8 * 18  # GPUs, and links of each, as in NVIDIA's DGX H100
_MAX_LINK_NUMBER = 1 << 16  # no device has as many; chosen
_BURST_GAP = 30 * SECOND  # messages that are closer are one burst: one window
_MAX_CODES, _MAX_TEXT, _MAX_LISTED = 8, 200, 18  # kept of messages and listed in evidence; chosen
_CLEARS = (
    "no error for some minutes, links up at full speed, and no message of the driver for"
    f" {MESSAGE_LIFETIME // SECOND // 60} minutes"
)


@dataclass
class LinkNvlink(Detector):
    """Watches the error counters, state and speed of each NVLink, and what the driver logs about it.

    Page: errors in two windows of 30 s, a link that was up and is down, or one that has lost `loss` of its best speed,
    each for `confirm` samples; or a message of the driver (XID 74, 136, 144 to 150, SXid) with errors, one that recurs
    after half a minute, or a fatal one of a switch. Suspect: one burst of errors or of messages. The cause is the link;
    the GPU if several of its links are affected; the node if at least half of its GPUs, and three, are affected. A link
    has two ends and one counter of errors: the faulty end is known only if just one end logs messages.

    Source: DCGM takes one replay or recovery in a window for a failure, imbue's cluster-health five errors: at 1 an
    hour (healthy, chosen) against 100, five errors reach the limit of 23. XIDs as in NVIDIA's catalogue. `loss` is one
    link of eighteen twice over, chosen; a link that sleeps is healthy (NVML).
    """

    name: ClassVar[str] = "link_nvlink"
    family: ClassVar[str] = "link degradation"
    device_class: ClassVar[str] = "nvlink"
    needs: ClassVar[tuple[str, ...]] = ("nvlink.state",)
    wants: ClassVar[tuple[str, ...]] = (
        *COUNTERS,
        *("nvlink.speed", "nvlink.generation", "event:xid", "event:sxid"),
        *("event:maintenance_start", "event:maintenance_end", "event:reset"),
    )
    cannot_see: ClassVar[str] = (
        "Links that were down when first seen, which end of a link is faulty if both log errors, and bandwidth lost "
        "without an error, a slower link or a message."
    )

    healthy_errors: float = 1.0
    faulty_errors: float = 100.0
    limit: float = 23.0
    loss: float = 0.1
    confirm: int = 3

    links: NDArray[Any] = memory(0, LINK_STATE)
    errors: PoissonCusum = part(lambda: PoissonCusum(COUNTERS, 1.0, 100.0), kept=True)
    gates: Gates = part(Gates)
    messages: DriverMessages = notes()
    blamed: dict[str, str] = notes()
    conditions: OpenConditions = notes()

    def __post_init__(self) -> None:
        self.errors.healthy, self.errors.faulty = self.healthy_errors, self.faulty_errors
        self.errors.limit = self.limit

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        sums = describe_cusum_rate(self.limit, self.errors.window, _LINKS_PER_NODE)
        return [f"errors, {sums}", f"links that are down or slow, and the driver's messages: {RULE}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of links, GPUs and nodes."""
        if not frames:
            return []
        self.gates.update(frames)
        time = max(frame.time for frame in frames.values())
        update_messages(self.messages, frames, time)
        frame = frames.get("nvlink")
        if frame is None or not len(frame.entities):
            return []  # nothing is known of the links at this instant: open conditions stay
        n = len(frame.entities)
        self.grow(n)
        self._update_links(frame)
        self.errors.update(frame, lambda: ~self.gates.maintenance_mask(frame) & (self.links["count"][:n] > LEARN))
        low = self.links["low"][:n] >= self.confirm
        errs = self.errors.is_suspect(n)
        if not (low.any() or errs.any() or self.messages or self.conditions):
            self.blamed.clear()
            return []
        judged = ~self.gates.maintenance_mask(frame)
        return self._findings(frame, low & judged, errs & judged)

    def _update_links(self, frame: Frame) -> None:
        """Reads state and speed of all links; no count exceeds `top`, above which a count changes nothing."""
        links, top = self.links[: len(frame.entities)], max(self.confirm, LEARN + 1)
        state, speed = frame["nvlink.state"], frame["nvlink.speed"]
        update_link_states(state, speed, links, frame.time, (self.confirm, top, 1 - self.loss))

    def _findings(self, frame: Frame, low: Bools, errs: Bools) -> list[Finding]:
        """Returns one finding for each GPU or node in trouble: of its links, of messages, or of both."""
        bad = np.flatnonzero((low | errs) & (self.links["count"][: len(low)] > LEARN))
        devices = self._group_by_device(frame, bad.tolist())
        self.blamed = {key: self.blamed.get(key) or self._blame(frame, key, devices[key]) for key in sorted(devices)}
        close_ended(self.conditions, set(self.blamed.values()))
        found = (self._device_finding(frame, key, links, low) for key, links in sorted(devices.items()))
        return [finding for finding in found if finding is not None]

    def _group_by_device(self, frame: Frame, bad: list[int]) -> dict[str, list[int]]:
        """Returns GPU or node -> its links in trouble; a node where half of its GPUs, and three, have some."""
        topology, groups = frame.topology, dict[str, list[int]]()
        for i in bad:
            gpu = topology.ancestor_of_kind(frame.entities[i], "gpu") or frame.entities[i]
            if not self._just_reset(frame, gpu):
                groups.setdefault(gpu, []).append(i)
        logged = [e for e in sorted(self.messages) if not self.gates.in_maintenance(e, topology, frame.time)]
        for entity in logged:
            if not entity.startswith("node:"):
                groups.setdefault(entity, [])
        nodes: dict[str, list[str]] = {}
        for gpu in groups:
            nodes.setdefault(topology.ancestor_of_kind(gpu, "node") or gpu, []).append(gpu)
        for node, gpus in nodes.items():
            many = len(gpus) >= 3 and 2 * len(gpus) >= self._count_gpus(frame, node)
            if node in self.blamed or (many and not any(gpu in self.blamed for gpu in gpus)):
                groups[node] = [i for gpu in gpus for i in groups.pop(gpu)]
        return groups | {node: [] for node in logged if node.startswith("node:") and node not in nodes}

    def _just_reset(self, frame: Frame, gpu: str) -> bool:
        """Returns whether links train after a reset or new software."""
        changed = self.gates.last_change(gpu, frame.topology)
        return changed is not None and frame.time - changed <= SETTLES

    def _count_gpus(self, frame: Frame, node: str) -> int:
        """Returns how many GPUs of a node have links."""
        mine = (e for e in frame.entities if frame.topology.ancestor_of_kind(e, "node") == node)
        return len({frame.topology.ancestor_of_kind(e, "gpu") for e in mine})

    def _blame(self, frame: Frame, key: str, links: list[int]) -> str:
        """Returns the one link in trouble, else its GPU or node; it is kept until the trouble is over."""
        return frame.entities[links[0]] if len(links) == 1 and not key.startswith("node:") else key

    def _device_finding(self, frame: Frame, key: str, links: list[int], low: Bools) -> Finding | None:
        n, entity, messages = len(frame.entities), self.blamed[key], self._messages_about(frame, key)
        errs, alarm = self.errors.is_suspect(n), self.errors.is_alarm(n)
        again = any(m["bursts"] > 1 or m["fatal"] for m in messages.values())  # both ends together are one burst
        page = again or bool(low[links].any() or alarm[links].any()) or bool(messages and links)
        since = [int(self.links["since"][i]) for i in links if low[i]]
        since += [int(self.errors.since[i]) for i in links if errs[i]] + [m["since"] for m in messages.values()]
        due = due_report(self.conditions, entity, frame.time, min(since), "page" if page else "suspect")
        if due is None:
            return None
        titles, signals, evidence = self._describe_links(frame, links, low)
        titles += [_list_codes(messages)] if messages else []
        evidence["log"] = {e: m["text"] for e, m in messages.items()}
        evidence["which_end"] = _which_end(entity, len(links), messages)
        score = float(self.errors.sums_of(n)[links].sum()) / self.limit + float(low[links].sum()) + len(messages)
        return self.finding(
            *(frame.time, entity, due),
            score=score,
            summary=pager_title(entity, ", ".join(titles)),
            signals=signals,
            clears=_CLEARS,
            **evidence,
        )

    def _describe_links(
        self, frame: Frame, links: list[int], low: Bools
    ) -> tuple[list[str], tuple[str, ...], dict[str, Any]]:
        """Returns title parts, signals and evidence from the state, speed and counters of some links."""
        state, speed, names = frame["nvlink.state"], frame["nvlink.speed"], frame.entities
        down = [names[i] for i in links if low[i] and state[i] == 0]
        best = self.links["best"]
        slow = {names[i]: round(float(1 - speed[i] / best[i]), 3) for i in links if low[i] and speed[i] < best[i]}
        slow = {name: lost for name, lost in slow.items() if name not in down}
        errors: dict[str, int] = {}
        for i in links:
            for name, count in self.errors.errors_by_counter(i).items():
                errors[name] = errors.get(name, 0) + count
        titles = ["down" if len(links) == 1 else f"{len(down)} NVLinks down"] if down else []
        titles += [f"{100 * max(slow.values()):.0f} % slower"] if slow else []
        titles += [f"{short_number(count)} {_counter_name(name)}" for name, count in errors.items()]
        signals = (("nvlink.state",) if down else ()) + (("nvlink.speed",) if slow else ()) + tuple(errors)
        listed = [names[i] for i in links][:_MAX_LISTED]
        evidence = {"links": listed, "down": down[:_MAX_LISTED], "lost_speed": slow, "errors": errors}
        return titles, signals or ("event:xid", "event:sxid"), evidence

    def _messages_about(self, frame: Frame, key: str) -> dict[str, dict[str, Any]]:
        """Returns the messages about a GPU or node, the devices below it, and the switches of its node."""
        node = frame.topology.ancestor_of_kind(key, "node")
        mine = {key, node}
        found = {e: m for e, m in self.messages.items() if e in mine}
        if key == node:
            found |= {e: m for e, m in self.messages.items() if frame.topology.ancestor_of_kind(e, "node") == node}
        return dict(sorted(found.items()))


def _counter_name(signal: str) -> str:
    return signal.removeprefix("nvlink.").replace("_", " ").replace("crc", "CRC")


def _list_codes(messages: Mapping[str, dict[str, Any]]) -> str:
    """Returns the messages in short: `XID 74, SXid 20001 on NVLink 3`."""
    codes = dict.fromkeys(code for m in messages.values() for code in m["codes"])
    links = sorted({m["link"] for m in messages.values() if "link" in m})
    return ", ".join(codes) + (f" on NVLink {', '.join(map(str, links))}" if links else "")


def _which_end(entity: str, links: int, messages: Mapping[str, dict[str, Any]]) -> str:
    """Returns which end of the link it is, as far as the messages show it."""
    switches = [m["switch"] for m in messages.values() if "switch" in m]
    if switches and not links and len(switches) == len(messages):
        return f"only {switches[0]} logged messages: its end, or the path between"
    if switches:
        return f"unknown: GPU and {switches[0]} both logged messages"
    if entity.startswith("node:"):
        return "links of half of its GPUs: what joins them, an NVSwitch or the board"
    return "several links of one GPU: its end" if links > 1 else "unknown: GPU, NVSwitch or between"


def update_messages(messages: DriverMessages, frames: Mapping[str, Frame], time: int) -> None:
    """Adds the messages of an instant and drops old ones.

    Left out are those that the catalogue calls harmless, and consequences, whose `root` names another message.
    """
    for event in sorted(_nvlink_events(frames), key=lambda e: (e.time, e.entity, e.kind)):
        known = messages.get(event.entity)
        if known is None:
            known = messages[event.entity] = {"since": event.time, "last": event.time, "bursts": 1, "codes": []}
        elif event.time - known["last"] >= _BURST_GAP:
            known["bursts"] += 1
        known["last"] = max(known["last"], event.time)
        number = read_integer(event.data.get(event.kind))
        code = f"{event.kind.upper().replace('SXID', 'SXid')} {'without a number' if number is None else number}"
        known["codes"] = [*dict.fromkeys([*known["codes"], code])][:_MAX_CODES]
        known["text"] = read_text(event.data.get("text"))[:_MAX_TEXT]
        known["fatal"] = known.get("fatal", False) or event.data.get("fatal") is True
        if (link := _link_number(event)) is not None:
            known["link"] = link
        if event.kind == "sxid":
            known["switch"] = read_text(event.data.get("switch")) or "a switch"
    for entity in [e for e, known in messages.items() if time - known["last"] > MESSAGE_LIFETIME]:
        del messages[entity]


def _nvlink_events(frames: Mapping[str, Frame]) -> list[Event]:
    return [
        e
        for e in events_of(frames, "xid", "sxid")
        if e.data.get("severity") != "info"
        and not e.data.get("root")
        and (e.kind == "sxid" or e.data.get("class") == "nvlink" or read_integer(e.data.get("xid")) in NVLINK_XIDS)
    ]


def _link_number(event: Event) -> int | None:
    """Returns the number of the link, where the message has it."""
    detail = event.data.get("detail")
    return read_integer(detail.get("link"), 0, _MAX_LINK_NUMBER) if isinstance(detail, Mapping) else None


@compiled
def update_link_states(
    state: Floats,
    speed: Floats,
    links: NDArray[np.void],
    time: int,
    limits: tuple[int, int, float],
) -> None:
    """Adds one sample of each NVLink. limits: samples that confirm, top of counts, least share of its best."""
    confirm, top, least = limits
    for i in range(len(state)):
        link = links[i]
        reported, fast = np.isfinite(state[i]), np.isfinite(speed[i])
        up = reported and state[i] != 0
        if fast:
            link.held = min(link.held + 1, top) if np.float32(speed[i]) == link.newest else 1
            link.newest = speed[i]
            if link.held >= confirm and speed[i] > link.best:
                link.best = speed[i]
        low = (reported and not up and link.was_up) or (fast and speed[i] < least * link.best)
        if low:
            if link.low == 0:
                link.since = time
            link.low = min(link.low + 1, top)
        elif reported or fast:
            link.low = 0
        if up:
            link.was_up = True
        if reported or fast:
            link.count = min(link.count + 1, top)
