"""Who may speak, as the API tells it: mutes, modes and detectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.answers import listed, moment
from pipeline.model.records import from_iso


@dataclass(frozen=True, slots=True)
class Mute:
    """One detector (or *) says nothing about a scope (or *) until `until`, unless it was ended before."""

    id: str
    detector: str
    scope: str
    since: int
    until: int
    ended: int | None
    reason: str
    user: str
    ended_by: str

    def stands(self, now: int) -> bool:
        """Whether it silences anything now."""
        return self.ended is None and self.until > now


@dataclass(frozen=True, slots=True)
class ModeRule:
    """A line of [[modes]]."""

    detector: str
    scope: str
    mode: str


@dataclass(frozen=True, slots=True)
class Detector:
    """Who judges. `off` names the signals that it lacks, `errors` counts the frames on which it failed."""

    name: str
    family: str
    device_class: str
    needs: tuple[str, ...]
    wants: tuple[str, ...]
    blind: str
    about: str
    settings: Mapping[str, Any]
    budget: tuple[str, ...]
    modes: tuple[ModeRule, ...]
    off: tuple[str, ...]
    errors: int


@dataclass(frozen=True, slots=True)
class Panel:
    """All detectors, and the rules of [[modes]] in their order."""

    detectors: tuple[Detector, ...]
    modes: tuple[ModeRule, ...]


def mute_of(table: Mapping[str, Any]) -> Mute:
    """One mute."""
    return Mute(
        id=str(table["id"]),
        detector=str(table["detector"]),
        scope=str(table["scope"]),
        since=from_iso(table["since"]),
        until=from_iso(table["until"]),
        ended=moment(table.get("ended")),
        reason=str(table["reason"]),
        user=str(table["user"]),
        ended_by=str(table.get("ended_by") or "hand"),
    )


def mutes_of(table: Mapping[str, Any]) -> tuple[Mute, ...]:
    """GET /api/v1/mutes."""
    return tuple(mute_of(m) for m in listed(table["mutes"]))


def panel_of(table: Mapping[str, Any]) -> Panel:
    """GET /api/v1/detectors."""
    return Panel(tuple(_detector(d) for d in listed(table["detectors"])), _rules(table["modes"]))


def _detector(table: Mapping[str, Any]) -> Detector:
    names = ("needs", "wants", "budget", "off")
    needs, wants, budget, off = (tuple(map(str, listed(table[name]))) for name in names)
    return Detector(
        name=str(table["name"]),
        family=str(table["family"]),
        device_class=str(table["class"]),
        needs=needs,
        wants=wants,
        blind=str(table["blind"]),
        about=str(table["about"]),
        settings=dict(table["settings"]),
        budget=budget,
        modes=_rules(table["modes"]),
        off=off,
        errors=int(table["errors"]),
    )


def _rules(value: Any) -> tuple[ModeRule, ...]:
    return tuple(ModeRule(str(r["detector"]), str(r["scope"]), str(r["mode"])) for r in listed(value))
