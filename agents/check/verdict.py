"""From what agent and pipeline say to one verdict: OK, WARNING, CRITICAL or UNKNOWN, as Nagios has them."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from agents.check import status
from agents.check.status import STALE_S, Condition
from agents.fitness_rules import COLLECTOR, INCIDENTS, names
from pipeline.config import Config
from pipeline.errors import ConfigError

OK, WARNING, CRITICAL, UNKNOWN = "OK", "WARNING", "CRITICAL", "UNKNOWN"
NAGIOS = {OK: 0, WARNING: 1, CRITICAL: 2, UNKNOWN: 3}
"""Exit codes of Nagios plugins: https://nagios-plugins.org/doc/guidelines.html, 'Plugin Return Codes'."""
OURS = {OK: 0, WARNING: 0, CRITICAL: 1, UNKNOWN: 3}
GRAVEST = (CRITICAL, WARNING, UNKNOWN, OK)
"""What is certain wins over what is not known."""
COLUMNS = ("check", "state", "entity", "since", "text")
MOST_TEXT = 400
"""Characters of the line; chosen: Slurm and old Nagios cut reasons at about as many."""
LEAST_S = 0.05
"""Shortest time that the pipeline is given where reading took nearly all; chosen."""
TROUBLE = ("fault", "hung")
"""States of a collector in which it does not see what it watches; `no data` means that there is nothing to see."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at. since: text, empty where nothing began."""

    check: str
    state: str
    entity: str
    since: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that was found. age: of the agent's word in s, None without one."""

    rows: tuple[Row, ...]
    age: float | None = None

    @property
    def state(self) -> str:
        """The gravest of the rows that are not ignored."""
        found = {row.state for row in self.rows}
        return next((state for state in GRAVEST if state in found), UNKNOWN)

    def line(self, took: float, timeout: float) -> str:
        """One line as Nagios wants it: state, text, figures after a bar."""
        grave = [row for row in self.rows if row.state == self.state]
        text = "; ".join(f"{row.entity} {row.text}" if row.entity else row.text for row in grave)
        counts = {state: sum(row.state == state for row in self.rows) for state in (CRITICAL, WARNING)}
        figures = "" if self.age is None else f"age={self.age:.1f}s;;{STALE_S:g};0 "
        figures += " ".join(f"{state.lower()}={count};;;0" for state, count in counts.items())
        return f"{self.state} - {_plain(text)} | {figures} time={took:.3f}s;;;0;{timeout:g}"

    def as_rows(self) -> list[dict[str, Any]]:
        """For people and programs."""
        return [asdict(row) for row in self.rows]


def unknown(text: str) -> Verdict:
    """Nobody knows, and why."""
    return Verdict((Row("check", UNKNOWN, "", "", text),))


def judge(config: Config, until: float) -> Verdict:
    """Asks the agent, and the pipeline too if it is configured, until then by time.monotonic. Raises ConfigError."""
    _checked(config)
    rows, age = list[Row](), None
    try:
        said = status.read(config)
        age = said.age
        rows += [_row(config, one) for one in (*said.conditions, *_blind(said))]
        if not any(row.state in (CRITICAL, WARNING) for row in rows):
            sound = sum(state == "ok" for state, _ in said.collectors.values())
            rows.insert(0, Row("agent", OK, "", "", f"fit for a job: {sound} collectors see nothing against it"))
    except status.NoStatus as nobody:
        rows.append(Row("agent", UNKNOWN, "", "", str(nobody)))
    return Verdict((*rows, *_asked(config, until)), age)


def _blind(said: status.Status) -> Iterator[Condition]:
    """Collectors that cannot see as conditions of the node."""
    for name, (state, reason) in said.collectors.items():
        if state in TROUBLE:
            yield Condition(f"{COLLECTOR}.{name}", "", "warning", 0, f"collector {name} is in state {state}: {reason}")


def _asked(config: Config, until: float) -> Iterator[Row]:
    """What the pipeline says."""
    if not config.check.api_url or INCIDENTS in config.check.ignore:
        return
    from agents.check import incidents  # it loads what speaks HTTP and TLS, which takes as long as all else

    try:
        found, not_known = incidents.of_node(config.check, config.agent.node, max(LEAST_S, until - time.monotonic()))
    except incidents.NoAnswer as nobody:
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        yield Row(INCIDENTS, UNKNOWN, "", since, f"incidents unknown at {since}: {nobody}")
        return
    for one in found:
        summary = f"incident {one.get('id')}: {one.get('summary')}"
        yield Row(INCIDENTS, config.check.incidents.upper(), str(one.get("cause")), str(one.get("onset", "")), summary)
    if not_known:
        last = f"{len(found)} page" if found else "no page"
        yield Row(INCIDENTS, UNKNOWN, "", "", f"incidents {not_known} (last known: {last} of this node)")
    elif not found:
        yield Row(INCIDENTS, OK, "", "", "no open page incident concerns this node")


def _row(config: Config, one: Condition) -> Row:
    passed = {one.name, one.name.partition(".")[0], one.entity} & set(config.check.ignore)
    since = datetime.fromtimestamp(one.since // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if one.since else ""
    return Row(one.name, "ignored" if passed else one.level.upper(), one.entity, since, one.text)


def _checked(config: Config) -> None:
    """What is to be ignored must be a name of ours, or an entity: a mistyped one would ignore nothing, silently."""
    for name in config.check.ignore:
        if ":" not in name and name.partition(".")[0] not in names():
            close = difflib.get_close_matches(name, names(), 1)
            mend = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(names())}, and entities"
            raise ConfigError(f"{config.source}: [check] ignore: no condition '{name}'; {mend}")


def _plain(text: str) -> str:
    """Without what would end the text for Nagios: its bar, line ends and control characters."""
    whole = re.sub(r"[\x00-\x1f\x7f-\x9f|\u2028\u2029]+", " ", text).strip()
    return whole if len(whole) <= MOST_TEXT else f"{whole[: MOST_TEXT - 3]}..."
