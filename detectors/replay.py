"""Runs recorded telemetry through the detectors, and through the Desk if asked: `fleetpulse replay`.

The same framer, grid, detectors and Desk as in the pipeline, and the same configuration, so that a recording of a fleet
gives what was found live. Only a recording whose signals a file declares (`signals`), which no pipeline can receive, is
judged on a finer grid than `[pipeline] frame` where its rows lie closer. Nothing is used that lies later than the
instant that is judged; nothing needs a network or a store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from detectors import configured
from detectors.runner import Runner
from pipeline.config.sections import Config
from pipeline.judging.frames import Framer
from pipeline.judging.mutes import FindingFilter, check_rules
from pipeline.judging.presence import LastSeen
from pipeline.model.errors import UsageError
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, Finding, Incident, Instant, Level, Rows
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.model.topology import Topology
from pipeline.recording.reader import FOREVER, Recording, read_events, read_signals, read_topology

OK, FINDINGS = 0, 1
_FINEST = SECOND  # the thresholds of the detectors hold for samples of 1 s and longer


class Desk(Protocol):
    """Turns findings into incidents: `pipeline.incidents.desk.Desk`, passed in, since detectors do not import it."""

    def observe(
        self, time: int, findings: Sequence[Finding], has_telemetry: Callable[[str], bool]
    ) -> Sequence[Any]: ...

    def open_level(self, finding: Finding) -> Level | None: ...


def replay(
    config: Config,
    inputs: Sequence[str | Path],
    output: str | Path,
    events: Sequence[str | Path] = (),
    signals: str | Path | None = None,
    topology: str | Path | None = None,
    incidents: str | Path | None = None,
    desk: Callable[[Topology, Callable[[str], bool]], Desk] | None = None,
) -> int:
    """Writes findings, and with `incidents` what the Desk made of them; 1 if there is a finding. Raises UsageError."""
    catalogue = read_signals(signals) if signals else CATALOGUE
    graph = read_topology(topology) if topology else Topology()
    recording, happened = Recording(inputs, catalogue), read_events(events)
    available = {s for names in recording.signals.values() for s in names} | {f"event:{e.kind}" for e in happened}
    runner = Runner(configured(config.detector, config.source), available, catalogue)
    for name, missing in runner.off.items():
        print(f"replay: {name} is off: the input has no {', '.join(missing)}", file=sys.stderr)  # noqa: T201 - talk
    cases = Cases(desk(graph, lambda e: bool(graph.attributes.get(e, {}).get("simulated")))) if desk else None
    check_rules(config.modes, runner.names)
    voice = FindingFilter(graph, config.modes)
    found = 0
    with ExitStack() as files:
        lines = files.enter_context(_written(output))
        step = int(config.pipeline.frame * SECOND)
        for instant in instants(recording, happened, graph, catalogue, step, runner.signals, finer=bool(signals)):
            standing = cases.open_level if cases is not None else _nothing_stands
            findings, heard = voice.filter_findings(runner.observe(instant.frames), standing, instant.time)
            found += len(findings)
            lines.writelines(json.dumps(f.as_json()) + "\n" for f in findings)
            if cases is not None:
                cases.observe(instant, heard)
        if incidents and cases is not None:
            files.enter_context(_written(incidents)).writelines(json.dumps(i.as_json()) + "\n" for i in cases.all())
    print(f"replay: {found} findings in {output}", file=sys.stderr)  # noqa: T201 - talk
    return FINDINGS if found else OK


def instants(
    recording: Recording,
    events: Sequence[Event],
    topology: Topology,
    catalogue: Mapping[str, Signal],
    step: int,
    signals: Collection[str],
    finer: bool = False,
) -> Iterator[Instant]:
    """Every instant of the recording in order of time, on a grid of `step` us, with frames of `signals`.

    finer: where the rows of a class lie closer, the grid is as fine as they are.

    At each the topology says who belonged to what then: inventories and jobs are followed, from the file's state on.
    """
    framer: Framer | None = None
    membership = Membership(topology)
    for rows, watermark in recording.read():
        if framer is None:
            grid = min([step, *map(_spacing, rows)]) if finer else step
            framer = Framer(grid, topology, recording.names, catalogue, signals=signals)
            framer.add_events(events)
        for block in rows:
            framer.add(block)
        yield from map(membership.apply_instant, framer.advance(watermark))


def _nothing_stands(_: Finding) -> Level | None:
    """Without a Desk no incident is open."""
    return None


def _spacing(rows: Rows) -> int:
    """Median time between two rows of one device; a grid much coarser would drop most of what was recorded."""
    order = np.lexsort((rows.time, rows.device))
    same = np.diff(rows.device[order]) == 0
    gaps = np.diff(rows.time[order])[same]
    gaps = gaps[gaps > 0]
    return max(_FINEST, int(np.median(gaps))) if len(gaps) else FOREVER


@contextmanager
def _written(path: str | Path) -> Iterator[IO[str]]:
    """A file that is there whole or not at all. Raises UsageError if it cannot be written."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; wanted a path in a folder that exists"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


class Cases:
    """The Desk over the instants, and the last state of every incident that it had."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._incidents: dict[str, Incident] = {}
        self._seen = LastSeen()

    def observe(self, instant: Instant, findings: Sequence[Finding]) -> None:
        self._seen.note(instant)
        for change in self._desk.observe(instant.time, findings, self._seen.present):
            self._incidents[change.incident.id] = change.incident

    def open_level(self, finding: Finding) -> Level | None:
        """Returns the level of its condition in an open incident, None if it is in none."""
        return self._desk.open_level(finding)

    def all(self) -> list[Incident]:
        """In order of their opening."""
        return sorted(self._incidents.values(), key=lambda i: (i.opened, i.id))
