"""Which incidents the rules of [[notify.inhibit_rules]] hold back, and by which other one: for their history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pipeline.model.records import Incident
from pipeline.notify.routes import Inhibition, Labels, match_all


class Inhibitor:
    """Finds, of all incidents that are not resolved, those that a rule inhibits.

    label_all: incidents -> labels of the alert of each, by its id.
    is_for_people: incident, labels -> whether a receiver takes it. One that none takes inhibits nothing: else
               neither would be sent.
    """

    def __init__(
        self,
        rules: tuple[Inhibition, ...],
        label_all: Callable[[Iterable[Incident]], Mapping[str, Labels]],
        is_for_people: Callable[[Incident, Labels], bool],
    ) -> None:
        self._rules, self._label_all, self._is_for_people = rules, label_all, is_for_people

    def find_all(self, incidents: Iterable[Incident]) -> dict[str, tuple[str, str]]:
        """Returns incident -> (the incident that inhibits it, the rule); those that none inhibits are left out.

        The sources of a rule are grouped by their `equal` labels, so that a storm costs one pass per rule.
        """
        known = {incident.id: incident for incident in incidents}
        labels = self._label_all(known.values())
        found: dict[str, tuple[str, str]] = {}
        for number, rule in enumerate(self._rules, 1):
            sources: dict[tuple[str, ...], dict[str, Labels]] = {}
            for id_, own in labels.items():
                if match_all(rule.source, own) and self._is_for_people(known[id_], own):
                    sources.setdefault(_key(rule, own), {})[id_] = own
            for id_, own in labels.items() if sources else ():
                if id_ in found:
                    continue
                source = rule.find_source(own, sources.get(_key(rule, own), {}))
                if source is not None:
                    found[id_] = (source, f"rule {number}: {describe_rule(rule)}")
        return found


def describe_rule(rule: Inhibition) -> str:
    """Returns a rule in one line: `alertname="CoolantFault" inhibits alertname="ThermalFault", equal loop`."""
    source, target = (", ".join(map(str, matchers)) for matchers in (rule.source, rule.target))
    return f"{source} inhibits {target}" + (f", equal {', '.join(rule.equal)}" if rule.equal else "")


def _key(rule: Inhibition, labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in rule.equal)
