"""The facts of an event as one line of text: numbers with units and three or four digits, times as times, long lists
as their length. The API writes it into timelines, and the pages into tables of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.model.records import iso
from pipeline.model.signals import CATALOGUE

MOST_NAMED = 8
"""Entries of a list that are named; a longer one is counted. Chosen: they fit in a line."""
MOST_PAIRS = 3
"""Pairs of a table that are named; a larger one, such as the ranks of a job, is counted. Chosen."""
_FIRST_US = 10**15
"""Smallest integer that is a time in UTC us: September 2001, beyond every count of an event."""
_OF_SIGNAL = frozenset({"value", "usual", "limit", "before", "expected"})
"""Facts in the unit of the event's `signal`."""

_OF_COLLAPSE = ("value", "usual", "share", "since")
_OF_RISE = ("value", "rise", "seconds", "limit", "since")
"""Facts of the events of agents/node/edge/coolant.py and temperature.py."""
_OF_CANARY = ("canary", "digest", "version")
"""Facts of the event `digest`: the results of a round of test problems."""


def describe_facts(data: Mapping[str, Any], most: int | None = None) -> str:
    """Returns the facts of an event in one line, `most` of them; empty ones are left out."""
    signal = CATALOGUE.get(str(data.get("signal")))
    unit = "" if signal is None or signal.unit == "1" else signal.unit
    if signal is not None and all(_is_number(data.get(key)) for key in _OF_COLLAPSE):
        return _describe_collapse(data, signal.column.replace("_", " "), unit)
    if signal is not None and all(_is_number(data.get(key)) for key in _OF_RISE):
        return _describe_rise(data, signal.column.replace("_", " "), unit)
    if all(isinstance(data.get(key), str) for key in _OF_CANARY):
        return _describe_canary(data)
    known = [(str(key), value) for key, value in data.items() if value not in (None, "", [], {})]
    shown = [_describe_fact(key, value, unit if key in _OF_SIGNAL else "") for key, value in known[:most]]
    return ", ".join(shown) + (", ..." if most is not None and len(known) > most else "")


def _describe_collapse(data: Mapping[str, Any], name: str, unit: str) -> str:
    """Returns what a sensor of coolant shows, and what it usually does."""
    limit, since = data["share"] * data["usual"], _since(data)
    shown = f"{name} {data['value']:.4g} {unit}, usual {data['usual']:.4g} {unit}"
    if data.get("state") == "cleared":
        return f"ended: {shown}; low {since}" + (f" ({data['why']})" if data.get("why") else "")
    others = data.get("others")
    beside = [
        f"; {CATALOGUE[other].column.replace('_', ' ')} at {100 * share:.3g} % of usual"
        for other, share in (others.items() if isinstance(others, Mapping) else ())
        if other in CATALOGUE and _is_number(share)
    ]
    return f"{shown}, limit {limit:.4g} {unit}{''.join(beside)}; {since}"


def _describe_rise(data: Mapping[str, Any], name: str, unit: str) -> str:
    """Returns how fast a temperature rises. limit: in K/s."""
    if data.get("state") == "cleared":
        return f"ended: {name} {data['value']:.4g} {unit}; rose {_since(data)}"
    fast = f"{data['rise']:.3g} K in {data['seconds']:.3g} s, limit {data['limit']:.3g} K/s"
    return f"{name} {data['value']:.4g} {unit}, {fast}; {_since(data)}"


def _describe_canary(data: Mapping[str, Any]) -> str:
    """Returns what a round of test problems gave, and how often it failed again; digests are in the evidence."""
    digest, expected, golden = str(data["digest"]), data.get("expected"), data.get("golden")
    if digest.startswith("died "):
        said = f"the test {digest}"
    elif golden is None and expected is None:
        said = "result without a known answer"
    else:
        said = "right result" if golden is True or (golden is None and digest == expected) else "wrong result"
    where = ", ".join(str(data[key]) for key in ("format", "range") if data.get(key))
    parts = [f"{said}{f' ({where})' if where else ''} of canary {data['canary']}"]
    if _is_number(data.get("again")):
        retests = "retest" if data["again"] == 1 else "retests"
        parts.append(f"wrong again in {data['again']:,} {retests}" if data["again"] else "right in all retests")
    if isinstance(data.get("wrong"), list) and len(data["wrong"]) > 1:
        parts.append(f"{len(data['wrong']):,} problems wrong")
    if _is_number(data.get("rounds")) and data["rounds"] > 1:
        parts.append(f"{data['rounds']:,} rounds since the last report")
    if _is_number(data.get("lacking")) and data["lacking"]:
        parts.append(f"{data['lacking']:,} problems that the device cannot compute")
    if _is_number(data.get("took")):
        parts.append(f"took {data['took']:.3g} s")
    return ", ".join(parts)


def _since(data: Mapping[str, Any]) -> str:
    return f"since {_text(int(data['since']))[11:]}"


def _describe_fact(key: str, value: Any, unit: str) -> str:
    name = key.replace("_", " ")
    if key == "signal" and value in CATALOGUE:
        return f"signal {CATALOGUE[value].column.replace('_', ' ')}"
    if key == "share" and _is_number(value):
        return f"share {100 * value:.3g} %"
    if key in ("seconds", "latency", "took") and _is_number(value):
        return f"{value:.4g} s" if key == "seconds" else f"{name} {value:.4g} s"
    if isinstance(value, Mapping):
        if len(value) > MOST_PAIRS or any(isinstance(one, (Mapping, list)) for one in value.values()):
            return f"{len(value):,} {name}"
        return f"{name} {', '.join(f'{k} {_text(v)}' for k, v in value.items())}"
    if isinstance(value, (list, tuple)):
        if len(value) > MOST_NAMED or any(isinstance(one, (Mapping, list)) for one in value):
            return f"{len(value):,} {name}"
        return f"{name} {', '.join(map(_text, value))}"
    return f"{name} {_text(value)}{f' {unit}' if unit and _is_number(value) else ''}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{iso(value)[:19]}Z" if value >= _FIRST_US else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
