"""Annotations of alerts: the title with the affected job or GPUs, impact, recommended action, and the runbook."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.config.sections import Config
from pipeline.incidents.advice import AdviceBook
from pipeline.model.entity_names import add_to_title
from pipeline.model.records import Incident


class Annotations:
    """Makes the annotations of incidents. find_impact: id of an incident -> who suffers, in one line and for a title;
    empty: unknown.

    Raises ConfigError if the site's advice cannot be read.
    """

    def __init__(self, config: Config, pages: str, find_impact: Callable[[str], tuple[str, str]]) -> None:
        self._advice = AdviceBook(config.incidents.advice_file, f"{pages.rstrip('/')}/detectors")
        self._find_impact = find_impact

    def __call__(self, incident: Incident, known: tuple[str, str] | None = None) -> Mapping[str, str]:
        """Returns `summary`, `impact`, `suggested_action` and `runbook_url`, without empty ones.

        known: the impact, as find_impact returns it, for threads which may not read the engine's books.
        """
        found = self._advice.find(incident.detector, incident.cause)
        impact, affected = self._find_impact(incident.id) if known is None else known
        notes = {**found, "summary": add_to_title(incident.summary, affected), "impact": impact}
        notes["suggested_action"] = notes.pop("advice")
        return {name: text for name, text in notes.items() if text}
