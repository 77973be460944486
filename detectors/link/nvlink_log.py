"""What the driver's log says of NVLinks: XIDs of that class and SXids of the switches, kept while they are news."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detectors.base.event_data import text, whole
from pipeline.records import SECOND, Event, Frame

Heard = dict[str, dict[str, Any]]

CODES = frozenset({74, 136, *range(144, 151)})
"""XIDs of NVLinks by NVIDIA's catalogue: 74 and 136 to Hopper, 144 to 150 on Blackwell."""
NEWS = 900 * SECOND
"""So long a message stands for what it tells of, if nothing else does; chosen: a driver repeats itself within that."""
_LINKS = 1 << 16  # no device has as many; chosen
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
        number = whole(event.data.get(event.kind))
        code = f"{event.kind.upper().replace('SXID', 'SXid')} {'without a number' if number is None else number}"
        known["codes"] = [*dict.fromkeys([*known["codes"], code])][:8]
        known["text"] = text(event.data.get("text"))[:200]
        known["fatal"] = known.get("fatal", False) or event.data.get("fatal") is True
        if (link := _link(event)) is not None:
            known["link"] = link
        if event.kind == "sxid":
            known["switch"] = text(event.data.get("switch")) or "a switch"
    for entity in [e for e, known in heard.items() if time - known["last"] > NEWS]:
        del heard[entity]


def _messages(frames: Mapping[str, Frame]) -> list[Event]:
    events = [e for frame in frames.values() for e in frame.events if e.kind in ("xid", "sxid")]
    return [
        e
        for e in events
        if e.data.get("severity") != "info"
        and not e.data.get("root")
        and (e.kind == "sxid" or e.data.get("class") == "nvlink" or whole(e.data.get("xid")) in CODES)
    ]


def _link(event: Event) -> int | None:
    """The link's number, where the message has it."""
    detail = event.data.get("detail")
    return whole(detail.get("link"), 0, _LINKS) if isinstance(detail, Mapping) else None
