"""Configurations of alert worlds, drawn by chance, and their meaning as Alertmanager 0.34 documents it.

The meaning is written down here a second time on purpose: the code under test is not asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.receivers import InhibitRule, Notify, PagerDuty, Route, Webhook

NAMES = ("hook", "desk", "pager")
"""Two webhooks and a PagerDuty."""
Labels = Mapping[str, str]
_TEXT = re.compile(r'(\w+)(=~|!~|!=|=)"(.*)"')
_UNITS = {"s": 1, "m": 60, "h": 3600}
_MATCHERS = (
    ('severity="critical"',),
    ('severity=~"critical|warning"',),
    ('rack="r0"',),
    ('rack=~"r1|r2"',),
    ('detector!="coolant"',),
    ('detector="hot"', 'rack="r0"'),
)
_EDITED = {
    'severity="critical"': 'severity=~"critical"',
    'severity=~"critical|warning"': 'severity=~"warning|critical"',
    'rack="r0"': 'rack=~"r0"',
    'rack=~"r1|r2"': 'rack=~"r1|r3"',
    'detector!="coolant"': 'detector!~"coolant"',
    'detector="hot"': 'detector=~"hot"',
}
"""Other texts of the same meaning: keys of groups are made of the text."""
_GROUPS = (("rack",), ("alertname",), ("alertname", "rack"), ("...",), ("site",), ())
RULES = {
    "none": (),
    "rack": (InhibitRule(('detector="coolant"',), ('detector=~"hot|xid"',), ("rack",)),),
    "all": (InhibitRule(('detector="coolant"',), ('detector="hot"',)),),
    "node": (InhibitRule(('severity="critical"',), ('severity="warning"',), ("node",)),),
}


@dataclass(frozen=True)
class Setting:
    """What an operator configures. route: as [notify.route]; None: no routes.   removed: receivers left out."""

    route: Route | None = None
    rules: str = "none"
    removed: tuple[str, ...] = ()

    @property
    def receivers(self) -> list[str]:
        return [name for name in NAMES if name not in self.removed]

    def build(self, urls: Mapping[str, str], key: Path) -> Notify:
        """Returns the section [notify]."""
        hooks = tuple(Webhook(name, f"{urls[name]}/") for name in ("hook", "desk") if name not in self.removed)
        pager = () if "pager" in self.removed else (PagerDuty("pager", key, url=urls["pager"]),)
        return Notify(webhooks=hooks, pagerduty=pager, route=self.route, inhibit_rules=RULES[self.rules])

    def describe(self) -> str:
        return f"rules={self.rules} removed={','.join(self.removed) or '-'} route={describe_route(self.route)}"

    # --- meaning --------------------------------------------------------------------------------------

    def list_routes(self, labels: Labels) -> list[Route]:
        """Returns the routes that an alert takes, with what they inherit."""
        if self.route is None:
            return [Route(name, group_by=("...",), group_wait="0s", group_interval="1s") for name in self.receivers]
        named = labels.get("receivers", "").split(", ")  # a storm goes to those that would get its pages
        led = {route.receiver: route for route in reversed(list(_list_all(self.route))) if route.receiver in named}
        if led:
            return list(led.values())
        return list(_walk(self.route, labels))

    def list_receivers(self, labels: Labels) -> list[str]:
        return [route.receiver for route in self.list_routes(labels)]

    def find_inhibitor(self, incident: str, firing: Mapping[str, Labels]) -> str:
        """Returns the incident that inhibits one of those that fire; empty: none does."""
        own = firing[incident]
        for rule in RULES[self.rules]:
            if not matches(rule.target_matchers, own):
                continue
            both = matches(rule.source_matchers, own)
            for other, labels in firing.items():
                if not matches(rule.source_matchers, labels) or (both and matches(rule.target_matchers, labels)):
                    continue
                if all(labels.get(name, "") == own.get(name, "") for name in rule.equal):
                    return other
        return ""

    @property
    def patience_s(self) -> int:
        """Seconds after which every receiver that answers has what it is to have."""
        if self.route is None:
            return 60
        waits = [(seconds(r.group_wait), seconds(r.group_interval)) for r in _list_all(self.route)]
        return max(w for w, _ in waits) + 2 * max(i for _, i in waits) + 60

    @property
    def repeat_s(self) -> int:
        return 0 if self.route is None else max(seconds(r.repeat_interval) for r in _list_all(self.route))


def seconds(text: str | None) -> int:
    """Returns the seconds of a duration with one unit."""
    assert text is not None
    return int(text[:-1]) * _UNITS[text[-1]]


def matches(texts: Sequence[str], labels: Labels) -> bool:
    """Returns whether all matchers match; a missing label is empty."""
    for text in texts:
        found = _TEXT.fullmatch(text)
        assert found is not None
        name, operator, value = found.groups()
        own = labels.get(name, "")
        same = own == value if operator in ("=", "!=") else re.fullmatch(value, own) is not None
        if same != (operator in ("=", "=~")):
            return False
    return True


def _children(route: Route) -> Iterator[Route]:
    for table in route.routes:
        names = ("receiver", "group_by", "group_wait", "group_interval", "repeat_interval")
        given = {name: table[name] for name in names if name in table}
        if "group_by" in given:
            given["group_by"] = tuple(given["group_by"])
        yield replace(
            route, matchers=tuple(table["matchers"]), continue_=table.get("continue", False), routes=(), **given
        )


def _walk(route: Route, labels: Labels) -> Iterator[Route]:
    is_led_on = False
    for child in _children(route):
        if not matches(child.matchers, labels):
            continue
        is_led_on = True
        yield child
        if not child.continue_:
            break
    if not is_led_on:
        yield route


def _list_all(route: Route) -> list[Route]:
    return [route, *_children(route)]


# --- by chance ------------------------------------------------------------------------------------


def draw_setting(chance: random.Random, has_routes: float = 0.75) -> Setting:
    """Returns a configuration of all receivers."""
    rules = chance.choice(tuple(RULES))
    return Setting(draw_route(chance) if chance.random() < has_routes else None, rules)


def draw_route(chance: random.Random) -> Route:
    """Returns a route, with up to two below it."""
    below: list[dict[str, Any]] = []
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        child: dict[str, Any] = {"receiver": chance.choice(NAMES), "matchers": list(chance.choice(_MATCHERS))}
        if chance.random() < 0.6:
            child["group_by"] = list(chance.choice(_GROUPS))
        if chance.random() < 0.4:
            child["group_wait"] = chance.choice(("0s", "10s"))
        if chance.random() < 0.4:
            child["continue"] = True
        below.append(child)
    return Route(
        receiver=chance.choice(NAMES),
        group_by=chance.choice(_GROUPS),
        group_wait=chance.choice(("0s", "10s", "30s")),
        group_interval=chance.choice(("30s", "1m", "2m")),
        repeat_interval=chance.choice(("10m", "30m", "2h")),
        routes=tuple(below),
    )


def change_setting(setting: Setting, chance: random.Random) -> Setting:
    """Returns another configuration, as an operator makes it of this one."""
    how = chance.choice(("route", "route", "none", "edit", "group", "rules", "remove", "return"))
    route = setting.route
    if how == "none":
        return replace(setting, route=None)
    if how == "rules":
        return replace(setting, rules=chance.choice(tuple(RULES)))
    if how == "return" or (how == "remove" and setting.removed):
        return replace(setting, removed=())
    if how == "remove":
        used = {r.receiver for r in _list_all(route)} if route is not None else set()
        free = [name for name in NAMES if name not in used]
        return replace(setting, removed=(chance.choice(free),)) if free else setting
    if how == "group" and route is not None:
        return replace(setting, route=replace(route, group_by=chance.choice(_GROUPS)))
    if how == "edit" and route is not None and route.routes:
        edited = tuple({**table, "matchers": [_EDITED.get(t, t) for t in table["matchers"]]} for table in route.routes)
        return replace(setting, route=replace(route, routes=edited))
    return replace(setting, route=draw_route(chance), removed=())


def describe_route(route: Route | None) -> str:
    if route is None:
        return "none"
    below = "; ".join(str(dict(table)) for table in route.routes)
    waits = f"{route.group_wait}/{route.group_interval}/{route.repeat_interval}"
    return f"{route.receiver} by {','.join(route.group_by or ()) or '(nothing)'} {waits} [{below}]"
