"""`fleetpulse check` itself: it ends within its timeout, whatever the network or a file system does.

Everything that may hang is done in a child process, which is left behind if it does: a thread that hangs in the kernel
would keep its whole process from ending, and with it whoever waits for that.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from agents.check.verdict import COLUMNS, NAGIOS, OURS, UNKNOWN, Row, Verdict, judge, unknown
from pipeline.config import Config
from pipeline.errors import FleetpulseError

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
    from pipeline.output import rendered

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
