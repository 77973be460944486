"""`fleetpulse check`: one verdict on this node for schedulers: OK, WARNING, CRITICAL or UNKNOWN, as in Nagios.

It always ends within its timeout. Everything that may hang runs in a child process, which is abandoned if it does: a
thread that hangs in the kernel would keep the whole process from ending, and block its caller.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from agents.node.health import status_file
from agents.node.health.rules import COLLECTOR, INCIDENTS, names
from agents.node.health.status_file import STALE_S, Condition
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError, FleetpulseError

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
        said = status_file.read(config)
        age = said.age
        rows += [_row(config, one) for one in (*said.conditions, *_blind(said))]
        if not any(row.state in (CRITICAL, WARNING) for row in rows):
            sound = sum(state == "ok" for state, _ in said.collectors.values())
            rows.insert(0, Row("agent", OK, "", "", f"fit for a job: {sound} collectors see nothing against it"))
    except status_file.NoStatus as nobody:
        rows.append(Row("agent", UNKNOWN, "", "", str(nobody)))
    return Verdict((*rows, *_asked(config, until)), age)


def _blind(said: status_file.Status) -> Iterator[Condition]:
    """Collectors that cannot see as conditions of the node."""
    for name, (state, reason) in said.collectors.items():
        if state in TROUBLE:
            yield Condition(f"{COLLECTOR}.{name}", "", "warning", 0, f"collector {name} is in state {state}: {reason}")


def _asked(config: Config, until: float) -> Iterator[Row]:
    """What the pipeline says."""
    if not config.check.api_url or INCIDENTS in config.check.ignore:
        return
    from agents.node.health import incidents  # it loads what speaks HTTP and TLS, which takes as long as all else

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


SPARE = 0.1
"""Share of the timeout that is kept for saying the verdict, and as much for an API's silence to become one; chosen."""
MOST_BYTES = 1 << 20


def run(load: Callable[[], Config], nagios: bool, timeout: float, form: str) -> int:
    """Prints the verdict and returns the exit code. `load` reads the configuration, which may hang too."""
    began = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # prologs run with any locale, or none
    verdict, code = _within(load, timeout)
    if nagios:
        said = _said(verdict.line(time.monotonic() - began, timeout) + "\n")
        return NAGIOS[verdict.state if said else UNKNOWN]
    if code:  # a configuration that cannot be used
        sys.stderr.write(f"fleetpulse: {verdict.rows[0].text}\n")
        return code
    from pipeline.commands.output import rendered

    text = rendered(verdict.as_rows(), COLUMNS, form)  # type: ignore[arg-type] # argparse admits only the four
    return OURS[verdict.state if _said(text) else UNKNOWN]


def _said(text: str) -> bool:
    """Whether stdout took it: a verdict that nobody can read is none. What it did not take is dropped."""
    if sys.stdout is None:  # it was closed before we began
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for good: who called us flushes it
        return False
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter fails at its exit, which is no code of ours
        return False
    return True


def _within(load: Callable[[], Config], timeout: float) -> tuple[Verdict, int]:
    """The child's verdict with the exit code of an error of ours; unknown where it says none in time."""
    while os.open(os.devnull, os.O_RDWR) <= 2:  # where stdout or stderr is closed, the pipe would take its number
        pass
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(load, time.monotonic() + timeout * (1 - 2 * SPARE), writer)
    os.close(writer)
    answer = _read(reader, time.monotonic() + timeout * (1 - SPARE))
    if answer is None:
        os.kill(child, signal.SIGKILL)  # not waited for: what hangs in the kernel does not end
        return unknown(f"no answer within {timeout:g} s: a file system or the network hangs"), 0
    os.waitpid(child, 0)
    try:
        found = json.loads(answer)
        return Verdict(tuple(Row(*row) for row in found["rows"]), found["age"]), found["code"]
    except ValueError:
        return unknown("the check itself failed; run: fleetpulse doctor"), 0


def _in_child(load: Callable[[], Config], until: float, writer: int) -> None:
    """Judges, answers and ends. It holds nothing of the caller's open: who reads to the end would wait for us."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(nothing, handle)
        try:
            verdict, code = judge(load(), until), 0
        except FleetpulseError as error:
            verdict, code = unknown(str(error)), error.exit_code
        rows = [(row.check, row.state, row.entity, row.since, row.text) for row in verdict.rows]
        view = memoryview(json.dumps({"rows": rows, "age": verdict.age, "code": code}).encode())
        while view:
            view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _read(reader: int, until: float) -> bytes | None:
    """Everything that comes until the other side closes; None if that takes longer, or is more than can be meant."""
    found = b""
    with open(reader, "rb", buffering=0) as file:
        while (left := until - time.monotonic()) > 0 and len(found) <= MOST_BYTES:
            if select.select([file], [], [], left)[0]:
                part = file.read(1 << 16)
                if not part:
                    return found
                found += part
    return None
