"""Timeline of an incident's page: events around it and its findings."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards import words
from dashboards.answers import IncidentDetail, TimelineItem
from dashboards.links import Text, entity_link
from pipeline.model.records import Finding

MAX_ROWS = 40
"""Rows of the timeline. Chosen."""
MAX_FINDINGS = 12
"""Own findings in the timeline, the earliest: a wide fault has hundreds of equal ones. Chosen."""


def timeline_rows(detail: IncidentDetail, items: Iterable[TimelineItem], now: int) -> list[tuple[str, str, Text, str]]:
    """Returns (time, type, entity, text) of events around the incident and of its findings, newest first, each once.

    An own finding has its newest title: `items` are older by up to a minute, and a title changes with its numbers.
    """
    own = sorted(detail.findings, key=lambda f: f.onset)[:MAX_FINDINGS]
    keys = {f.key for f in own}
    found = {(i.time, i.entity, i.text): i.kind for i in items if (_detector(i), i.entity, i.time) not in keys}
    for finding in own:
        text = f"{finding.level} {finding.detector}{_suppressed(finding)}: {finding.summary}"  # as the API writes it
        found[finding.onset, finding.entity, text] = "finding"
    ordered = sorted(found.items(), reverse=True)[:MAX_ROWS]
    return [
        (words.clock(time, now), kind.replace("_", " "), entity_link(entity), words.plain(text))
        for (time, entity, text), kind in ordered
    ]


def _detector(item: TimelineItem) -> str:
    """Returns the detector of a finding, whose text begins with level and detector; empty without one."""
    words_of = item.text.split()
    return words_of[1].rstrip(":") if item.kind == "finding" and len(words_of) > 1 else ""


def _suppressed(finding: Finding) -> str:
    muted, mode = finding.evidence.get("muted"), finding.evidence.get("mode")
    return " (muted)" if muted else " (only recorded)" if mode == "record" else ""
