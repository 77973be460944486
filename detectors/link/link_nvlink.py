"""Finds NVLinks that err, slow down or fall out, and says which end of a link it is as far as that can be told.

What the driver's log says of NVLinks: XIDs of that class and SXids of the switches, kept while they are news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_integer, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import SETTLES, Gates
from detectors.base.kernel import compiled
from detectors.base.streams import LEARN
from detectors.link.alarm_rates import RULES, of_sum
from detectors.link.poisson_cusum import Tallies
from pipeline.model.records import SECOND, Event, Finding, Frame

Heard = dict[str, dict[str, Any]]

CODES = frozenset({74, 136, *range(144, 151)})
"""XIDs of NVLinks by NVIDIA's catalogue: 74 and 136 to Hopper, 144 to 150 on Blackwell."""
NEWS = 900 * SECOND
"""So long a message stands for what it tells of, if nothing else does; chosen: a driver repeats itself within that."""
_MOST_LINKS = 1 << 16  # no device has as many; chosen
_APART = 30 * SECOND  # two messages of one window are one burst


def hear(heard: Heard, frames: Mapping[str, Frame], time: int) -> None:
    """Takes the messages of an instant and forgets old ones.

    Left out are those that the table calls harmless and those whose `root` says that they are consequences.
    """
    for event in sorted(_messages(frames), key=lambda e: (e.time, e.entity, e.kind)):
        known = heard.get(event.entity)
        if known is None:
            known = heard[event.entity] = {"since": event.time, "last": event.time, "bursts": 1, "codes": []}
        elif event.time - known["last"] >= _APART:
            known["bursts"] += 1
        known["last"] = max(known["last"], event.time)
        number = read_integer(event.data.get(event.kind))
        code = f"{event.kind.upper().replace('SXID', 'SXid')} {'without a number' if number is None else number}"
        known["codes"] = [*dict.fromkeys([*known["codes"], code])][:8]
        known["text"] = read_text(event.data.get("text"))[:200]
        known["fatal"] = known.get("fatal", False) or event.data.get("fatal") is True
        if (link := _link(event)) is not None:
            known["link"] = link
        if event.kind == "sxid":
            known["switch"] = read_text(event.data.get("switch")) or "a switch"
    for entity in [e for e, known in heard.items() if time - known["last"] > NEWS]:
        del heard[entity]


def _messages(frames: Mapping[str, Frame]) -> list[Event]:
    events = [e for frame in frames.values() for e in frame.events if e.kind in ("xid", "sxid")]
    return [
        e
        for e in events
        if e.data.get("severity") != "info"
        and not e.data.get("root")
        and (e.kind == "sxid" or e.data.get("class") == "nvlink" or read_integer(e.data.get("xid")) in CODES)
    ]


def _link(event: Event) -> int | None:
    """The link's number, where the message has it."""
    detail = event.data.get("detail")
    return read_integer(detail.get("link"), 0, _MOST_LINKS) if isinstance(detail, Mapping) else None


Floats = NDArray[np.float64]
COUNTERS = tuple(
    f"nvlink.{name}"
    for name in (
        *("crc_errors", "replay_errors", "recovery_errors", "recoveries", "recoveries_failed", "effective_errors"),
        *("rx_errors", "malformed_packets", "buffer_overruns", "integrity_errors"),
    )
)
_LINKS = 8 * 18  # of a node: GPUs and links of each, as in NVIDIA's DGX H100
LINK = np.dtype(
    [
        ("count", "<i4"),  # samples of its state or speed
        ("was_up", "?"),
        ("best", "<f4"),  # the speed that it has held for some samples
        ("low", "<i2"),  # samples running in which it was down or slower than that
        ("since", "<i8"),  # when that began
        ("held", "<i2"),  # samples running at the speed of `newest`
        ("newest", "<f4"),
    ]
)


@dataclass
class LinkNvlink(Detector):
    """Error counters of each NVLink, its state and speed, and what the driver logs of it.

    Page: errors in two windows of 30 s, a link that was up and is down, or one that has lost `loss` of its best speed,
    each for `confirm` samples; or a message of the driver (XID 74, 136, 144 to 150, SXid) with errors, one that comes
    again after half a minute, or a fatal one of a switch. Suspect: one burst of errors or of messages.
    Blamed is the link; the GPU where several of its links err; the node where GPUs enough err to mean what joins them.
    A link has two ends and one counter of errors: which end it is, is told only where one end alone speaks.

    Source: DCGM takes one replay or recovery in a window for a failure, imbue's cluster-health five errors: at 1 an
    hour (healthy, chosen) against 100, five errors reach the limit of 23. XIDs as in NVIDIA's catalogue. `loss` is one
    link of eighteen twice over, chosen; a link that sleeps is well (NVML).
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
        "Links that were down when first seen, which end of a link errs where both speak, and bandwidth lost without"
        " an error, a slower link or a message."
    )

    healthy_errors: float = 1.0
    faulty_errors: float = 100.0
    limit: float = 23.0
    loss: float = 0.1
    confirm: int = 3

    links: NDArray[Any] = memory(0, LINK)
    tallies: Tallies = part(lambda: Tallies(COUNTERS, 1.0, 100.0))
    gates: Gates = part(Gates)
    heard: Heard = notes()
    blamed: dict[str, str] = notes()
    conditions: OpenConditions = notes()

    def __post_init__(self) -> None:
        self.tallies.healthy, self.tallies.faulty = self.healthy_errors, self.faulty_errors
        self.tallies.limit = self.limit

    def budget(self) -> list[str]:
        sums = of_sum(self.limit, self.tallies.window, _LINKS)
        return [f"errors, {sums}", f"links that are down or slow, and the driver's messages: {RULES}"]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        self.gates.update(frames)
        time = max(frame.time for frame in frames.values())
        hear(self.heard, frames, time)
        frame = frames.get("nvlink")
        if frame is None or not len(frame.entities):
            return []  # nothing is known of the links at this instant: what was said of them stands
        n = len(frame.entities)
        self.grow(n)
        self._look(frame)
        self.tallies.step(frame, lambda: ~self.gates.maintenance_mask(frame) & (self.links["count"][:n] > LEARN))
        low = self.links["low"][:n] >= self.confirm
        errs = self.tallies.suspect(n)
        if not (low.any() or errs.any() or self.heard or self.conditions):
            self.blamed.clear()
            return []
        idle = ~self.gates.maintenance_mask(frame)
        return self._judge(frame, low & idle, errs & idle)

    def _look(self, frame: Frame) -> None:
        """Takes state and speed of all links; no count goes beyond `top`, after which what stays changes nothing."""
        links, top = self.links[: len(frame.entities)], max(self.confirm, LEARN + 1)
        state, speed = frame["nvlink.state"], frame["nvlink.speed"]
        lanes_step(state, speed, links, frame.time, (self.confirm, top, 1 - self.loss))

    def _judge(self, frame: Frame, low: NDArray[np.bool_], errs: NDArray[np.bool_]) -> list[Finding]:
        """One finding for each GPU or node in trouble: of its links, of what was logged, or of both."""
        bad = np.flatnonzero((low | errs) & (self.links["count"][: len(low)] > LEARN))
        subjects = self._subjects(frame, bad.tolist())
        self.blamed = {key: self.blamed.get(key) or self._blame(frame, key, subjects[key]) for key in sorted(subjects)}
        close_ended(self.conditions, set(self.blamed.values()))
        found = (self._finding(frame, key, links, low) for key, links in sorted(subjects.items()))
        return [finding for finding in found if finding is not None]

    def _subjects(self, frame: Frame, bad: list[int]) -> dict[str, list[int]]:
        """GPU or node -> its links in trouble. A node instead of its GPUs where half of them, and three, have some."""
        topology, groups = frame.topology, dict[str, list[int]]()
        for i in bad:
            gpu = topology.ancestor_of_kind(frame.entities[i], "gpu") or frame.entities[i]
            if not self._just_reset(frame, gpu):
                groups.setdefault(gpu, []).append(i)
        logged = [e for e in sorted(self.heard) if not self.gates.in_maintenance(e, topology, frame.time)]
        for entity in logged:
            if not entity.startswith("node:"):
                groups.setdefault(entity, [])
        nodes: dict[str, list[str]] = {}
        for gpu in groups:
            nodes.setdefault(topology.ancestor_of_kind(gpu, "node") or gpu, []).append(gpu)
        for node, gpus in nodes.items():
            many = len(gpus) >= 3 and 2 * len(gpus) >= self._size(frame, node)
            if node in self.blamed or (many and not any(gpu in self.blamed for gpu in gpus)):
                groups[node] = [i for gpu in gpus for i in groups.pop(gpu)]
        return groups | {node: [] for node in logged if node.startswith("node:") and node not in nodes}

    def _just_reset(self, frame: Frame, gpu: str) -> bool:
        """Links train after a reset or new software."""
        changed = self.gates.last_change(gpu, frame.topology)
        return changed is not None and frame.time - changed <= SETTLES

    def _size(self, frame: Frame, node: str) -> int:
        """GPUs of a node that have links."""
        mine = (e for e in frame.entities if frame.topology.ancestor_of_kind(e, "node") == node)
        return len({frame.topology.ancestor_of_kind(e, "gpu") for e in mine})

    def _blame(self, frame: Frame, key: str, links: list[int]) -> str:
        """The one link in trouble, else its GPU or node; who is blamed first is blamed until it is over."""
        return frame.entities[links[0]] if len(links) == 1 and not key.startswith("node:") else key

    def _finding(self, frame: Frame, key: str, links: list[int], low: NDArray[np.bool_]) -> Finding | None:
        n, entity, said = len(frame.entities), self.blamed[key], self._messages(frame, key)
        errs, alarm = self.tallies.suspect(n), self.tallies.alarm(n)
        again = any(m["bursts"] > 1 or m["fatal"] for m in said.values())  # both ends at once are one burst
        page = again or bool(low[links].any() or alarm[links].any()) or bool(said and links)
        since = [int(self.links["since"][i]) for i in links if low[i]]
        since += [int(self.tallies.since[i]) for i in links if errs[i]] + [m["since"] for m in said.values()]
        due = due_report(self.conditions, entity, frame.time, min(since), "page" if page else "suspect")
        if due is None:
            return None
        words, signals, facts = self._told(frame, links, low)
        words += [f"was named by the driver's log ({_logged(said)})"] if said else []
        where = _end(entity, len(links), said)
        facts |= {"log": {e: m["text"] for e, m in said.items()}, "which_end": where}
        score = float(self.tallies.padded(n)[links].sum()) / self.limit + float(low[links].sum()) + len(said)
        summary = f"{entity} {' and '.join(words)}; {where}"
        return Finding(
            *(frame.time, due[0], entity, self.name, due[1], score, summary),
            make_evidence(_CLEARS, None, **facts),
            signals,
        )

    def _told(
        self, frame: Frame, links: list[int], low: NDArray[np.bool_]
    ) -> tuple[list[str], tuple[str, ...], dict[str, Any]]:
        """Words, signals and evidence of what state, speed and counters of some links show."""
        state, speed, names = frame["nvlink.state"], frame["nvlink.speed"], frame.entities
        down = [names[i] for i in links if low[i] and state[i] == 0]
        best = self.links["best"]
        slow = {names[i]: round(float(1 - speed[i] / best[i]), 3) for i in links if low[i] and speed[i] < best[i]}
        slow = {name: lost for name, lost in slow.items() if name not in down}
        errors: dict[str, int] = {}
        for i in links:
            for name, count in self.tallies.counted(i).items():
                errors[name] = errors.get(name, 0) + count
        words = ["is down" if len(links) == 1 else f"has {len(down)} NVLinks down"] if down else []
        words += [f"has lost {max(slow.values()):.0%} of its speed"] if slow else []
        words += ["has " + ", ".join(f"{count} {_words(name)}" for name, count in errors.items())] if errors else []
        signals = (("nvlink.state",) if down else ()) + (("nvlink.speed",) if slow else ()) + tuple(errors)
        facts = {"links": [names[i] for i in links][:18], "down": down[:18], "lost_speed": slow, "errors": errors}
        return words, signals or ("event:xid", "event:sxid"), facts

    def _messages(self, frame: Frame, key: str) -> dict[str, dict[str, Any]]:
        """What was logged of a GPU or node in trouble: of itself, what is below it, and the switches of its node."""
        node = frame.topology.ancestor_of_kind(key, "node")
        mine = {key, node}
        found = {e: m for e, m in self.heard.items() if e in mine}
        if key == node:
            found |= {e: m for e, m in self.heard.items() if frame.topology.ancestor_of_kind(e, "node") == node}
        return dict(sorted(found.items()))


_CLEARS = (
    "no error for some minutes, links up at their full speed again and no message of the driver for"
    f" {NEWS // SECOND // 60} minutes"
)


def _words(signal: str) -> str:
    return signal.removeprefix("nvlink.").replace("_", " ").replace("crc", "CRC")


def _logged(said: Mapping[str, dict[str, Any]]) -> str:
    """The messages in short: `XID 74 and SXid 20001 of NVLink 3`."""
    codes = dict.fromkeys(code for m in said.values() for code in m["codes"])
    links = sorted({m["link"] for m in said.values() if "link" in m})
    of = f" of NVLink {', '.join(map(str, links))}" if links else ""
    return " and ".join(codes) + of


def _end(entity: str, links: int, said: Mapping[str, dict[str, Any]]) -> str:
    """Which end of the link it is, as far as those who speak tell."""
    switches = [m["switch"] for m in said.values() if "switch" in m]
    if switches and not links and len(switches) == len(said):
        return f"only {switches[0]} speaks: its end, or what lies between"
    if switches:
        return f"GPU and {switches[0]} both speak: cannot tell which end"
    if entity.startswith("node:"):
        return "links of half of its GPUs: what joins them, an NVSwitch or the board"
    return "several links of one GPU: its end" if links > 1 else "cannot tell which end: GPU, NVSwitch or between"


@compiled
def lanes_step(
    state: Floats,
    speed: Floats,
    links: NDArray[np.void],
    time: int,
    limits: tuple[int, int, float],
) -> None:
    """One sample of each NVLink. limits: samples that confirm, the top of counts, and the least share of its best."""
    confirm, top, least = limits
    for i in range(len(state)):
        link = links[i]
        told, fast = np.isfinite(state[i]), np.isfinite(speed[i])
        up = told and state[i] != 0
        if fast:
            link.held = min(link.held + 1, top) if np.float32(speed[i]) == link.newest else 1
            link.newest = speed[i]
            if link.held >= confirm and speed[i] > link.best:
                link.best = speed[i]
        low = (told and not up and link.was_up) or (fast and speed[i] < least * link.best)
        if low:
            if link.low == 0:
                link.since = time
            link.low = min(link.low + 1, top)
        elif told or fast:
            link.low = 0
        if up:
            link.was_up = True
        if told or fast:
            link.count = min(link.count + 1, top)
