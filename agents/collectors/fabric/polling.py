"""One thread that asks the fabric, one tool at a time, and keeps the newest answer of each until it is taken.

A pass that took t seconds is not repeated before t more have gone by: a fabric that is large or ill is never asked for
more than half of the time. Counters are read from the list of nodes that `ibnetdiscover` cached, so that they cost no
discovery of their own.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.command import Command, CommandError, Output
from agents.collectors.fabric.tool_output import (
    THRESHOLDS,
    Counts,
    Facts,
    Link,
    parse_counts,
    parse_links,
    parse_switches,
)

LINKS, COUNTERS, TOPOLOGY = "links", "counters", "topology"
TOOLS: Mapping[str, str] = {LINKS: "iblinkinfo", COUNTERS: "ibqueryerrors", TOPOLOGY: "ibnetdiscover"}
MOST_OUTPUT = 256 << 20
"""Most bytes of one answer; chosen: ten times 65,000 ports with their counters."""
_LEAST_WAIT_S = 0.05
_PROCESS = re.compile(r"(?<=: )\[\d+\] ")
"""The tool's process in a line, as libibumad and libibmad print it: it would make one reason a new one each time."""
_NOISE = ("sim_connect",)
"""Words of lines on standard error that say nothing: the simulator's greeting."""


@dataclass(frozen=True, slots=True)
class Found:
    """What arrived since the last time; None where nothing did. troubles: tool -> why it fails, "" where it works."""

    links: tuple[Link, ...] | None = None
    counts: Counts | None = None
    facts: Mapping[str, Facts] | None = None
    troubles: Mapping[str, str] = field(default_factory=dict)


class Passes:
    """tools: folder of the commands. options: what each is given, such as the port to ask through."""

    def __init__(self, tools: Path, options: tuple[str, ...], limit: float, every: Mapping[str, float]) -> None:
        self._tools, self._options, self._every = tools, options, dict(every)
        self._command = Command(limit, MOST_OUTPUT)
        self._due = dict.fromkeys(self._every, 0.0)
        self._resting = dict.fromkeys(self._every, 0.0)
        self._lines: Mapping[str, Link] = {}
        self._new: dict[str, object] = {}
        self._troubles: dict[str, str] = {}
        self._lock, self._stop, self._first = threading.Lock(), threading.Event(), threading.Event()
        self._folder: Path | None = None
        self._cache: Path | None = None
        self._thread = threading.Thread(target=self._run, name="asks the fabric", daemon=True)

    def begin(self, seconds: float) -> str:
        """Why the first pass over the links brought nothing; "" where it did, or takes longer than these seconds."""
        self._thread.start()
        self._first.wait(seconds)
        with self._lock:
            return self._troubles.get(LINKS, "")

    def stop(self) -> None:
        """Ends the tool that runs; waits for that, as no longer than a look at it takes."""
        self._stop.set()
        self._command.stop()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def take(self) -> Found:
        """What is new; each answer is given once."""
        with self._lock:
            new, self._new = self._new, {}
            troubles, self._troubles = self._troubles, {}
        return Found(new.get(LINKS), new.get(COUNTERS), new.get(TOPOLOGY), troubles)  # type: ignore[arg-type] # by key

    def _run(self) -> None:
        asks: Mapping[str, Callable[[], object]] = {
            LINKS: self._links,
            TOPOLOGY: self._topology,
            COUNTERS: self._counts,
        }
        try:
            while not self._stop.is_set():
                name = min(self._due, key=lambda n: (max(self._due[n], self._resting[n]), list(asks).index(n)))
                wait = max(self._due[name], self._resting[name]) - time.monotonic()
                if wait > 0:
                    self._stop.wait(max(wait, _LEAST_WAIT_S))
                else:
                    self._ask(name, asks[name])
        finally:
            if self._folder is not None:
                import shutil  # here, as tempfile below: every agent loads this file, and few watch a fabric

                shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, name: str, ask: Callable[[], object]) -> None:
        began, trouble, answer = time.monotonic(), "", None
        try:
            answer = ask()
        except CommandError as error:
            trouble = str(error)
        except Exception as fault:  # noqa: BLE001 - one odd answer must not end all asking; it is told as the tool's
            trouble = f"{TOOLS[name]}: its answer could not be read: {type(fault).__name__}: {fault}"
        ended = time.monotonic()
        self._due[name], self._resting[name] = began + self._every[name], 2 * ended - began
        with self._lock:
            self._troubles[name] = trouble
            if answer is not None:
                self._new[name] = answer
        if name == LINKS:
            self._first.set()

    def _links(self) -> tuple[Link, ...]:
        output = self._told(LINKS, "--line", "--switches-only")
        lines = parse_links(output.text, self._lines)
        if not lines:
            raise CommandError(
                "iblinkinfo: named no port of a switch; wanted at least one: is the port to ask through up?"
            )
        if {(k.place, k.peer) for k in lines.values()} != {(k.place, k.peer) for k in self._lines.values()}:
            self._due[TOPOLOGY] = 0.0  # the cache knows another fabric
        self._lines = lines
        return tuple(lines.values())

    def _topology(self) -> Mapping[str, Facts]:
        """Renews the cache too; where no file can be written, counters are read without it."""
        fresh = self._place(f"cache-{time.monotonic_ns()}")
        output = self._told(TOPOLOGY, *(("--cache", str(fresh)) if fresh else ()))
        if self._cache is not None:
            self._cache.unlink(missing_ok=True)
        self._cache = fresh if fresh is not None and fresh.is_file() else None
        return parse_switches(output.text)

    def _counts(self) -> Counts:
        """Errors, then traffic: two passes of one tool, each of which may fail for some ports."""
        thresholds = self._place("thresholds")
        if thresholds is None:
            raise CommandError("ibqueryerrors: no folder in TMPDIR for its thresholds; wanted a writable one")
        thresholds.write_text(THRESHOLDS)
        cached = ("--load-cache", str(self._cache)) if self._cache else ()
        traffic = self._told(COUNTERS, "--switch", "--counters", *cached, may_fail=True)
        errors = self._told(COUNTERS, "--switch", "--threshold-file", str(thresholds), *cached, may_fail=True)
        flows, found = parse_counts(traffic.text), parse_counts(errors.text, errors.talk, errors.cut)
        if not flows.values and not found.whole:
            raise CommandError(f"ibqueryerrors: {_reason(errors)}")
        values = {place: dict(flow) for place, flow in flows.values.items()}
        for place, counted in found.values.items():
            values.setdefault(place, {}).update(counted)
        return Counts(values, found.failed, found.whole)

    def _told(self, name: str, *arguments: str, may_fail: bool = False) -> Output:
        tool = TOOLS[name]
        output = self._command.run((str(self._tools / tool), *self._options, *arguments))
        if output.code and not may_fail:
            raise CommandError(f"{tool}: {_reason(output)}")
        return output

    def _place(self, name: str) -> Path | None:
        """A file of our own; None where there is no room for one."""
        if self._folder is None:
            import tempfile

            with contextlib.suppress(OSError):  # a file system that is read-only: said by who cannot do without
                self._folder = Path(tempfile.mkdtemp(prefix="fleetpulse-fabric-"))
        return self._folder / name if self._folder is not None else None


def _reason(output: Output) -> str:
    """The last words of a command that failed."""
    lines = [line.strip() for line in output.talk.splitlines() if not any(word in line for word in _NOISE)]
    last = next((x for x in reversed(lines) if x), "without a word")
    return f"ended with {output.code}: {_PROCESS.sub('', last)[:200]}"
