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
from agents.node.health.rules import COLLECTOR, INCIDENTS, condition_names
from agents.node.health.status_file import STALE_S, HealthCondition
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError, FleetpulseError

OK, WARNING, CRITICAL, UNKNOWN = "OK", "WARNING", "CRITICAL", "UNKNOWN"
NAGIOS_EXIT = {OK: 0, WARNING: 1, CRITICAL: 2, UNKNOWN: 3}
"""Exit codes of Nagios plugins: https://nagios-plugins.org/doc/guidelines.html, 'Plugin Return Codes'."""
EXIT = {OK: 0, WARNING: 0, CRITICAL: 1, UNKNOWN: 3}
BY_SEVERITY = (CRITICAL, WARNING, UNKNOWN, OK)
"""The first of these that is found is the verdict: certain states precede unknown ones."""
COLUMNS = ("check", "state", "entity", "since", "text")
MAX_LINE = 400
"""Characters of the line; chosen: Slurm and old Nagios cut reasons at about as many."""
MIN_API_S = 0.05
"""Shortest timeout of the API, if reading the status took nearly all; chosen."""
FAILED_STATES = ("fault", "hung")
"""States of a collector in which it does not see what it monitors; `no data` means that there is nothing to see."""
RESERVE = 0.1
"""Share of the timeout reserved for printing the verdict, and as much for reporting that the API is silent; chosen."""
MAX_RESULT_BYTES = 1 << 20


def run_check(load: Callable[[], Config], nagios: bool, timeout: float, form: str) -> int:
    """Prints the verdict and returns the exit code. `load` reads the configuration, which may hang too."""
    began = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # prologs run with any locale, or none
    result, code = _run_child(load, timeout)
    if nagios:
        printed = _print(result.nagios_line(time.monotonic() - began, timeout) + "\n")
        return NAGIOS_EXIT[result.state if printed else UNKNOWN]
    if code:  # a configuration that cannot be used
        sys.stderr.write(f"fleetpulse: {result.rows[0].text}\n")
        return code
    from pipeline.commands.output import render_rows

    text = render_rows(result.to_rows(), COLUMNS, form)  # type: ignore[arg-type] # argparse admits only the four
    return EXIT[result.state if _print(text) else UNKNOWN]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One checked condition. since: text, empty if there is no beginning."""

    check: str
    state: str
    entity: str
    since: str
    text: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All that was found. age: of the agent's status in s, None without one."""

    rows: tuple[CheckRow, ...]
    age: float | None = None

    @property
    def state(self) -> str:
        """The most severe state of the rows that are not ignored."""
        found = {row.state for row in self.rows}
        return next((state for state in BY_SEVERITY if state in found), UNKNOWN)

    def nagios_line(self, took: float, timeout: float) -> str:
        """One line in the format of Nagios plugins: state, text, performance data after a bar."""
        worst = [row for row in self.rows if row.state == self.state]
        text = "; ".join(f"{row.entity} {row.text}" if row.entity else row.text for row in worst)
        counts = {state: sum(row.state == state for row in self.rows) for state in (CRITICAL, WARNING)}
        figures = "" if self.age is None else f"age={self.age:.1f}s;;{STALE_S:g};0 "
        figures += " ".join(f"{state.lower()}={count};;;0" for state, count in counts.items())
        return f"{self.state} - {_clean_text(text)} | {figures} time={took:.3f}s;;;0;{timeout:g}"

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, for output."""
        return [asdict(row) for row in self.rows]


def unknown_result(text: str) -> CheckResult:
    """The result UNKNOWN with its reason."""
    return CheckResult((CheckRow("check", UNKNOWN, "", "", text),))


def evaluate_node(config: Config, until: float) -> CheckResult:
    """Evaluates the agent's status, and the pipeline's incidents if configured, until time.monotonic() is `until`.

    Raises ConfigError.
    """
    _check_ignored_names(config)
    rows, age = list[CheckRow](), None
    try:
        status = status_file.read_status(config)
        age = status.age
        rows += [_condition_row(config, one) for one in (*status.conditions, *_collector_conditions(status))]
        if not any(row.state in (CRITICAL, WARNING) for row in rows):
            healthy = sum(state == "ok" for state, _ in status.collectors.values())
            rows.insert(0, CheckRow("agent", OK, "", "", f"fit for a job: {healthy} collectors report no problem"))
    except status_file.NoStatus as missing:
        rows.append(CheckRow("agent", UNKNOWN, "", "", str(missing)))
    return CheckResult((*rows, *_pipeline_rows(config, until)), age)


def _collector_conditions(status: status_file.NodeStatus) -> Iterator[HealthCondition]:
    """Failed collectors as conditions of the node."""
    for name, (state, reason) in status.collectors.items():
        if state in FAILED_STATES:
            text = f"collector {name} is in state {state}: {reason}"
            yield HealthCondition(f"{COLLECTOR}.{name}", "", "warning", 0, text)


def _pipeline_rows(config: Config, until: float) -> Iterator[CheckRow]:
    """The rows of the pipeline's incidents."""
    if not config.check.api_url or INCIDENTS in config.check.ignore:
        return
    from agents.node.health import incidents  # it loads HTTP and TLS, which takes as long as everything else

    try:
        timeout = max(MIN_API_S, until - time.monotonic())
        found, not_known = incidents.read_incidents(config.check, config.agent.node, timeout)
    except incidents.NoAnswer as error:
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        yield CheckRow(INCIDENTS, UNKNOWN, "", since, f"incidents unknown at {since}: {error}")
        return
    severity = config.check.incidents.upper()
    for one in found:
        summary = f"incident {one.get('id')}: {one.get('summary')}"
        yield CheckRow(INCIDENTS, severity, str(one.get("cause")), str(one.get("onset", "")), summary)
    if not_known:
        last = f"{len(found)} page" if found else "no page"
        yield CheckRow(INCIDENTS, UNKNOWN, "", "", f"incidents {not_known} (last known: {last} of this node)")
    elif not found:
        yield CheckRow(INCIDENTS, OK, "", "", "no open page incident concerns this node")


def _condition_row(config: Config, one: HealthCondition) -> CheckRow:
    ignored = {one.name, one.name.partition(".")[0], one.entity} & set(config.check.ignore)
    since = datetime.fromtimestamp(one.since // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if one.since else ""
    return CheckRow(one.name, "ignored" if ignored else one.level.upper(), one.entity, since, one.text)


def _check_ignored_names(config: Config) -> None:
    """Raises ConfigError if [check] ignore has an unknown name: a typing error would silently ignore nothing."""
    for name in config.check.ignore:
        if ":" not in name and name.partition(".")[0] not in condition_names():
            close = difflib.get_close_matches(name, condition_names(), 1)
            fix = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(condition_names())}, and entities"
            raise ConfigError(f"{config.source}: [check] ignore: no condition '{name}'; {fix}")


def _clean_text(text: str) -> str:
    """The text without what ends it in Nagios: bars, line ends and control characters."""
    whole = re.sub(r"[\x00-\x1f\x7f-\x9f|\u2028\u2029]+", " ", text).strip()
    return whole if len(whole) <= MAX_LINE else f"{whole[: MAX_LINE - 3]}..."


def _print(text: str) -> bool:
    """Whether stdout accepted the text: a verdict that was not printed is UNKNOWN. The rest of it is dropped."""
    if sys.stdout is None:  # it was closed before this process started
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - never closed: the caller flushes it
        return False
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter fails at exit, with a code that is not ours
        return False
    return True


# --- the child process ----------------------------------------------------------------------------------------------


def _run_child(load: Callable[[], Config], timeout: float) -> tuple[CheckResult, int]:
    """The child's result, and the exit code of a configuration error; UNKNOWN if it does not respond in time."""
    while os.open(os.devnull, os.O_RDWR) <= 2:  # if stdout or stderr is closed, the pipe would take its number
        pass
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _evaluate_in_child(load, time.monotonic() + timeout * (1 - 2 * RESERVE), writer)
    os.close(writer)
    answer = _read_all(reader, time.monotonic() + timeout * (1 - RESERVE))
    if answer is None:
        os.kill(child, signal.SIGKILL)  # not waited for: a process that hangs in the kernel does not end
        return unknown_result(f"no answer within {timeout:g} s: a file system or the network hangs"), 0
    os.waitpid(child, 0)
    try:
        found = json.loads(answer)
        return CheckResult(tuple(CheckRow(*row) for row in found["rows"]), found["age"]), found["code"]
    except ValueError:
        return unknown_result("the check itself failed; run: fleetpulse doctor"), 0


def _evaluate_in_child(load: Callable[[], Config], until: float, writer: int) -> None:
    """Evaluates, writes the result and ends. It closes the caller's files, so that no reader of them waits for it."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(nothing, handle)
        try:
            result, code = evaluate_node(load(), until), 0
        except FleetpulseError as error:
            result, code = unknown_result(str(error)), error.exit_code
        rows = [(row.check, row.state, row.entity, row.since, row.text) for row in result.rows]
        view = memoryview(json.dumps({"rows": rows, "age": result.age, "code": code}).encode())
        while view:
            view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _read_all(reader: int, until: float) -> bytes | None:
    """Everything until the other end closes; None if that takes longer, or is too much."""
    found = b""
    with open(reader, "rb", buffering=0) as file:
        while (left := until - time.monotonic()) > 0 and len(found) <= MAX_RESULT_BYTES:
            if select.select([file], [], [], left)[0]:
                part = file.read(1 << 16)
                if not part:
                    return found
                found += part
    return None
