"""Routes and rules of inhibition with the names and meanings of Alertmanager 0.34."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.receivers import InhibitRule, Notify, Route, parse_duration
from pipeline.config.settings import build_section
from pipeline.incidents.matchers import Matcher, check_matcher
from pipeline.incidents.silences import STORM_RECEIVERS
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.matcher_text import unquote_value

EACH = ("...",)
"""`group_by` that groups nothing."""
_MATCHER = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|[^\s,{}"]*)\s*(?:,|$)', re.ASCII
)
Labels = Mapping[str, str]
SEPARATOR = ", "
"""Between the names of several receivers, which have no comma."""


def parse_matchers(texts: Iterable[str], where: str) -> tuple[Matcher, ...]:
    """Returns the matchers of texts such as `severity="critical"` or `{rack=~"r1.*", node!="n7"}`, sorted by name.

    Raises ConfigError, also on what RE2 refuses.
    """
    found: list[Matcher] = []
    for text in texts:
        inner, at = text.strip(), 0
        if inner.startswith("{") and inner.endswith("}"):
            inner = inner[1:-1].strip()
        while at < len(inner):
            one = _MATCHER.match(inner, at)
            if one is None:
                raise ConfigError(f'{where} {text!r}: expected matchers such as severity="critical" or rack=~"r1.*"')
            name, operator, value = one.groups()
            made = Matcher(name, unquote_value(value), "~" in operator, not operator.startswith("!"))
            try:
                found.append(check_matcher(made))
            except UsageError as error:
                raise ConfigError(f"{where}: {error}; expected a regular expression of RE2") from error
            at = one.end()
    return tuple(sorted(found, key=lambda m: (m.name, m.value, m.sign)))


def match_all(matchers: Sequence[Matcher], labels: Labels) -> bool:
    """Returns whether all matchers hold; a label that is missing is empty."""
    return all(matcher.holds(labels.get(matcher.name, "")) for matcher in matchers)


# --- the tree -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouteNode:
    """A route with what it inherits. key: path of matchers, as in Alertmanager's `groupKey`; not unique."""

    key: str
    receiver: str
    matchers: tuple[Matcher, ...]
    group_by: tuple[str, ...]
    wait_s: float
    interval_s: float
    repeat_s: float
    continues: bool
    children: tuple[RouteNode, ...] = ()

    def match(self, labels: Labels) -> list[RouteNode]:
        """Returns the routes of an alert, deepest first match; more than one only with `continue`."""
        if not match_all(self.matchers, labels):
            return []
        found: list[RouteNode] = []
        for child in self.children:
            below = child.match(labels)
            found += below
            if below and not child.continues:
                break
        return found or [self]

    def walk(self, depth: int = 0) -> Iterable[tuple[int, RouteNode]]:
        """Yields (depth, route) of this route and all below it."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def group_labels(self, labels: Labels) -> dict[str, str]:
        """Returns the labels that name the group of an alert."""
        names = sorted(labels) if self.group_by == EACH else sorted(self.group_by)
        return {name: labels[name] for name in names if name in labels}

    def group_key(self, labels: Labels) -> str:
        """Returns Alertmanager's `groupKey`."""
        return f"{self.key}:{show_labels(self.group_labels(labels))}"


def show_labels(labels: Labels) -> str:
    """Returns labels as in a `groupKey`, behind the key of the route."""
    return "{" + ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in labels.items()) + "}"


def build_tree(notify: Notify) -> RouteNode | None:
    """Returns the routes of [notify.route], None if there are none. Raises ConfigError."""
    if notify.route is None:
        return None
    if notify.route.matchers:
        raise ConfigError("[notify.route] matchers: the first route gets every alert; expected none")
    if not notify.route.receiver:
        raise ConfigError("[notify.route] receiver: missing; expected the name of a receiver")
    known = {one.name for one in notify.receivers}
    top = RouteNode("{}", "", (), (), 30.0, 300.0, 14_400.0, False)  # Alertmanager's defaults (s)
    return _build_node(notify.route, "notify.route", top, known, top=True)


def _build_node(route: Route, where: str, above: RouteNode, known: set[str], top: bool = False) -> RouteNode:
    matchers = parse_matchers(route.matchers, f"[{where}] matchers")
    receiver = route.receiver or above.receiver
    if receiver not in known:
        raise ConfigError(f"[{where}] receiver = {receiver!r}: not a receiver; known: {', '.join(sorted(known))}")
    wait = above.wait_s if route.group_wait is None else parse_duration(route.group_wait)
    interval = above.interval_s if route.group_interval is None else parse_duration(route.group_interval)
    repeat = above.repeat_s if route.repeat_interval is None else parse_duration(route.repeat_interval)
    key = above.key if top else f"{above.key}/{{{','.join(map(str, matchers))}}}"
    group_by = above.group_by if route.group_by is None else route.group_by
    node = RouteNode(key, receiver, matchers, group_by, wait, interval, repeat, route.continue_)
    children = []
    for number, table in enumerate(route.routes):
        below = f"{where}.routes[{number}]"
        children.append(_build_node(build_section(Route, table, "configuration", below), below, node, known))
    return replace(node, children=tuple(children))


@dataclass(frozen=True, slots=True)
class Inhibition:
    """One inhibition rule."""

    source: tuple[Matcher, ...]
    target: tuple[Matcher, ...]
    equal: tuple[str, ...]

    def find_source(self, labels: Labels, firing: Mapping[str, Labels]) -> str | None:
        """Returns the incident that inhibits an alert. What matches both sides is inhibited only by what does not."""
        if not match_all(self.target, labels):
            return None
        both = match_all(self.source, labels)
        for incident, other in firing.items():
            if not match_all(self.source, other) or (both and match_all(self.target, other)):
                continue
            if all(other.get(name, "") == labels.get(name, "") for name in self.equal):
                return incident
        return None


def build_inhibitions(rules: Sequence[InhibitRule]) -> tuple[Inhibition, ...]:
    """Returns the rules of [[notify.inhibit_rules]]. Raises ConfigError."""
    where = "[[notify.inhibit_rules]]"
    found = []
    for rule in rules:
        source = parse_matchers(rule.source_matchers, f"{where} source_matchers")
        target = parse_matchers(rule.target_matchers, f"{where} target_matchers")
        if not source or not target:
            raise ConfigError(f"{where}: source_matchers and target_matchers: expected at least one matcher each")
        found.append(Inhibition(source, target, rule.equal))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Rules:
    """The tree of routes, and the rules of inhibition."""

    top: RouteNode | None
    inhibitions: tuple[Inhibition, ...]

    @property
    def routes(self) -> list[RouteNode]:
        """All routes, each before those below it. Siblings with the same matchers have the same key."""
        return [] if self.top is None else [node for _, node in self.top.walk()]

    def match(self, labels: Labels) -> list[RouteNode]:
        """Returns the routes of an alert. A storm goes where its pages would: to each of their receivers, by the first
        route that leads there."""
        if self.top is None:
            return []
        names, found = labels.get(STORM_RECEIVERS, "").split(SEPARATOR), dict[str, RouteNode]()
        for node in self.routes if STORM_RECEIVERS in labels else ():
            if node.receiver in names:
                found.setdefault(node.receiver, node)
        return [*found.values()] or self.top.match(labels)

    @property
    def hold(self) -> bool:
        """Whether messages may be held."""
        return self.top is not None or bool(self.inhibitions)

    def is_target(self, labels: Labels) -> bool:
        """Returns whether a rule may inhibit an alert."""
        return any(match_all(rule.target, labels) for rule in self.inhibitions)


def build_rules(notify: Notify) -> Rules:
    """Returns routes and inhibition of the configuration. Raises ConfigError."""
    return Rules(build_tree(notify), build_inhibitions(notify.inhibit_rules))
