"""A thread that runs the fabric tools one at a time and keeps the newest output of each.

After a run of t seconds the tool is not run again for t seconds, so that a large or broken fabric is busy at most half
of the time. Counters use the node list cached by `ibnetdiscover` and need no discovery of their own.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.command import CommandError, CommandOutput, CommandRunner
from agents.collectors.fabric.tool_output import (
    THRESHOLD_FILE,
    CounterReadings,
    SwitchInfo,
    SwitchPort,
    parse_counts,
    parse_links,
    parse_switches,
)

LINKS, COUNTERS, TOPOLOGY = "links", "counters", "topology"
TOOLS: Mapping[str, str] = {LINKS: "iblinkinfo", COUNTERS: "ibqueryerrors", TOPOLOGY: "ibnetdiscover"}
MAX_OUTPUT = 256 << 20
"""Most bytes of one output. Chosen: ten times 65,000 ports with their counters."""
_MIN_WAIT_S = 0.05
_PROCESS_ID = re.compile(r"(?<=: )\[\d+\] ")
"""The tool's process id in a line of libibumad and libibmad; removed so that the same reason stays the same text."""
_NOISE_WORDS = ("sim_connect",)
"""Words of meaningless lines on standard error: the simulator's greeting."""


@dataclass(frozen=True, slots=True)
class PollResults:
    """What arrived since the last call; None if nothing did. errors: tool -> why it fails, "" if it works."""

    links: tuple[SwitchPort, ...] | None = None
    counters: CounterReadings | None = None
    switches: Mapping[str, SwitchInfo] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


class FabricPoller:
    """tools: folder of the commands. options: given to each command, such as the port to use."""

    def __init__(self, tools: Path, options: tuple[str, ...], limit: float, every: Mapping[str, float]) -> None:
        self._tools, self._options, self._every = tools, options, dict(every)
        self._command = CommandRunner(limit, MAX_OUTPUT)
        self._due_at = dict.fromkeys(self._every, 0.0)
        self._resting_until = dict.fromkeys(self._every, 0.0)
        self._lines: Mapping[str, SwitchPort] = {}
        self._results: dict[str, object] = {}
        self._errors: dict[str, str] = {}
        self._lock, self._stop, self._first_done = threading.Lock(), threading.Event(), threading.Event()
        self._folder: Path | None = None
        self._cache: Path | None = None
        self._thread = threading.Thread(target=self._run, name="fabric poller", daemon=True)

    def start(self, seconds: float) -> str:
        """Starts the thread. Returns why the first poll of the links failed; "" if it worked or takes longer than
        `seconds`.
        """
        self._thread.start()
        self._first_done.wait(seconds)
        with self._lock:
            return self._errors.get(LINKS, "")

    def stop(self) -> None:
        """Kills the running tool and waits for the thread."""
        self._stop.set()
        self._command.stop()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def take_results(self) -> PollResults:
        """Returns what is new. Each result is returned once."""
        with self._lock:
            new, self._results = self._results, {}
            troubles, self._errors = self._errors, {}
        return PollResults(new.get(LINKS), new.get(COUNTERS), new.get(TOPOLOGY), troubles)  # type: ignore[arg-type] # by key

    def _run(self) -> None:
        asks: Mapping[str, Callable[[], object]] = {
            LINKS: self._poll_links,
            TOPOLOGY: self._poll_topology,
            COUNTERS: self._poll_counters,
        }
        try:
            while not self._stop.is_set():
                name = min(
                    self._due_at, key=lambda n: (max(self._due_at[n], self._resting_until[n]), list(asks).index(n))
                )
                wait = max(self._due_at[name], self._resting_until[name]) - time.monotonic()
                if wait > 0:
                    self._stop.wait(max(wait, _MIN_WAIT_S))
                else:
                    self._run_tool(name, asks[name])
        finally:
            if self._folder is not None:
                import shutil  # imported here, like tempfile below: every agent loads this file, but few read a fabric

                shutil.rmtree(self._folder, ignore_errors=True)

    def _run_tool(self, name: str, ask: Callable[[], object]) -> None:
        began, trouble, answer = time.monotonic(), "", None
        try:
            answer = ask()
        except CommandError as error:
            trouble = str(error)
        except Exception as fault:  # noqa: BLE001 - one broken output must not end the thread; it is reported as the tool's
            trouble = f"{TOOLS[name]}: cannot parse its output: {type(fault).__name__}: {fault}"
        ended = time.monotonic()
        self._due_at[name], self._resting_until[name] = began + self._every[name], 2 * ended - began
        with self._lock:
            self._errors[name] = trouble
            if answer is not None:
                self._results[name] = answer
        if name == LINKS:
            self._first_done.set()

    def _poll_links(self) -> tuple[SwitchPort, ...]:
        output = self._run_command(LINKS, "--line", "--switches-only")
        lines = parse_links(output.text, self._lines)
        if not lines:
            raise CommandError("iblinkinfo: listed no switch port; expected at least one: is the local port up?")
        if {(k.key, k.peer) for k in lines.values()} != {(k.key, k.peer) for k in self._lines.values()}:
            self._due_at[TOPOLOGY] = 0.0  # the cached node list is outdated
        self._lines = lines
        return tuple(lines.values())

    def _poll_topology(self) -> Mapping[str, SwitchInfo]:
        """Reads the topology and renews the cached node list.

        If no file can be written, counters are read without it.
        """
        fresh = self._temporary_file(f"cache-{time.monotonic_ns()}")
        output = self._run_command(TOPOLOGY, *(("--cache", str(fresh)) if fresh else ()))
        if self._cache is not None:
            self._cache.unlink(missing_ok=True)
        self._cache = fresh if fresh is not None and fresh.is_file() else None
        return parse_switches(output.text)

    def _poll_counters(self) -> CounterReadings:
        """Reads errors, then traffic: two runs of one tool, each of which may fail for some ports."""
        thresholds = self._temporary_file("thresholds")
        if thresholds is None:
            raise CommandError("ibqueryerrors: cannot create its threshold file; expected a writable folder TMPDIR")
        thresholds.write_text(THRESHOLD_FILE)
        cached = ("--load-cache", str(self._cache)) if self._cache else ()
        traffic = self._run_command(COUNTERS, "--switch", "--counters", *cached, may_fail=True)
        errors = self._run_command(COUNTERS, "--switch", "--threshold-file", str(thresholds), *cached, may_fail=True)
        flows, found = parse_counts(traffic.text), parse_counts(errors.text, errors.errors, errors.errors_cut)
        if not flows.values and not found.complete:
            raise CommandError(f"ibqueryerrors: {_failure_reason(errors)}")
        values = {place: dict(flow) for place, flow in flows.values.items()}
        for place, counted in found.values.items():
            values.setdefault(place, {}).update(counted)
        return CounterReadings(values, found.failed_ports, found.complete)

    def _run_command(self, name: str, *arguments: str, may_fail: bool = False) -> CommandOutput:
        tool = TOOLS[name]
        output = self._command.run((str(self._tools / tool), *self._options, *arguments))
        if output.code and not may_fail:
            raise CommandError(f"{tool}: {_failure_reason(output)}")
        return output

    def _temporary_file(self, name: str) -> Path | None:
        """Returns a path for a temporary file; None if no folder can be created."""
        if self._folder is None:
            import tempfile

            with contextlib.suppress(OSError):  # a read-only file system: reported by the caller that needs the file
                self._folder = Path(tempfile.mkdtemp(prefix="fleetpulse-fabric-"))
        return self._folder / name if self._folder is not None else None


def _failure_reason(output: CommandOutput) -> str:
    """Returns the last line on standard error of a failed command."""
    lines = [line.strip() for line in output.errors.splitlines() if not any(word in line for word in _NOISE_WORDS)]
    last = next((x for x in reversed(lines) if x), "no output")
    return f"exit status {output.code}: {_PROCESS_ID.sub('', last)[:200]}"
