"""Runs recorded telemetry through the detectors, and optionally through the Desk: `fleetpulse replay`.

Framer, grid, detectors, Desk and configuration are those of the pipeline, so a recording of a fleet gives the live
findings. Only a recording with declared signals (`signals`), which no pipeline can receive, is judged on a finer grid
than `[pipeline] frame` where its rows are closer. No data later than the judged instant is used; no network and no
store are needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from detectors import configured
from detectors.calibrations import load_calibration, read_calibration
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
        self,
        time: int,
        findings: Sequence[Finding],
        has_telemetry: Callable[[str], bool],
        *,
        is_monitored: Callable[[str], bool],
    ) -> Sequence[Any]:
        """Adds the findings of one instant; returns the changed incidents."""
        ...

    def open_level(self, finding: Finding) -> Level | None:
        """Returns the level of the finding's condition in an open incident; None if there is none."""
        ...


def replay(
    config: Config,
    inputs: Sequence[str | Path],
    output: str | Path,
    events: Sequence[str | Path] = (),
    signals: str | Path | None = None,
    topology: str | Path | None = None,
    incidents: str | Path | None = None,
    desk: Callable[[Topology, Callable[[str], bool]], Desk] | None = None,
    calibration: str | Path | None = None,
) -> int:
    """Writes the findings, and incidents if asked; returns 1 if there is a finding. Raises UsageError.

    calibration: exported thresholds of a site to begin with, instead of the shipped ones.
    """
    catalogue = read_signals(signals) if signals else CATALOGUE
    graph = read_topology(topology) if topology else Topology()
    recording, history = Recording(inputs, catalogue), read_events(events)
    available = {s for names in recording.signals.values() for s in names} | {f"event:{e.kind}" for e in history}
    runner = _make_runner(config, available, catalogue, calibration)
    replayed = ReplayedIncidents(desk(graph, partial(_is_simulated, graph))) if desk else None
    check_rules(config.modes, runner.names)
    filters = FindingFilter(graph, config.modes, site=config.site.name)
    found = 0
    with ExitStack() as files:
        lines = files.enter_context(_written(output))
        step = int(config.pipeline.frame * SECOND)
        for instant in read_instants(recording, history, graph, catalogue, step, runner.signals, finer=bool(signals)):
            open_level = replayed.open_level if replayed else _no_open_level
            findings, reported = filters.filter_findings(runner.observe(instant.frames), open_level, instant.time)
            found += len(findings)
            lines.writelines(json.dumps(f.as_json()) + "\n" for f in findings)
            if replayed is not None:
                replayed.observe(instant, reported)
        if incidents and replayed is not None:
            files.enter_context(_written(incidents)).writelines(
                json.dumps(i.as_json()) + "\n" for i in replayed.incidents()
            )
    print(f"replay: {found} findings in {output}", file=sys.stderr)  # noqa: T201 - log
    return FINDINGS if found else OK


def _make_runner(
    config: Config, available: Collection[str], catalogue: Mapping[str, Signal], calibration: str | Path | None
) -> Runner:
    """Returns the detectors; those that lack signals are reported on stderr."""
    runner = Runner(configured(config.detector, config.source), available, catalogue)
    if calibration is not None:
        load_calibration(runner.detectors, read_calibration(calibration))
    for name, missing in runner.off.items():
        print(f"replay: {name} is off: the input has no {', '.join(missing)}", file=sys.stderr)  # noqa: T201 - log
    return runner


def read_instants(
    recording: Recording,
    events: Sequence[Event],
    topology: Topology,
    catalogue: Mapping[str, Signal],
    step: int,
    signals: Collection[str],
    finer: bool = False,
) -> Iterator[Instant]:
    """Yields the instants of the recording in order of time, on a grid of `step` us, with frames of `signals`.

    finer: where the rows of a class are closer, the grid is as fine as they are.

    The topology follows inventories and jobs, beginning with the state in the file.
    """
    framer: Framer | None = None
    membership = Membership(topology)
    for rows, watermark in recording.read():
        if framer is None:
            grid = min([step, *map(_spacing, rows)]) if finer else step
            framer = Framer(grid, topology, recording.names, catalogue, signals=signals)
            framer.add_events(events)
        for block in rows:
            framer.add_rows(block)
        yield from map(membership.apply_instant, framer.advance(watermark))


def _is_simulated(topology: Topology, entity: str) -> bool:
    """Returns whether an entity is simulated; a job has no attributes, only the name that the simulator gave it."""
    known = topology.attributes.get(entity, {}).get("simulated")
    return entity.partition(":")[2].startswith("sim-") if known is None else bool(known)


def _no_open_level(_: Finding) -> Level | None:
    """Without a Desk no incident is open."""
    return None


def _spacing(rows: Rows) -> int:
    """Returns the median time between two rows of one device; a much coarser grid would drop most rows."""
    order = np.lexsort((rows.time, rows.device))
    same = np.diff(rows.device[order]) == 0
    gaps = np.diff(rows.time[order])[same]
    gaps = gaps[gaps > 0]
    return max(_FINEST, int(np.median(gaps))) if len(gaps) else FOREVER


@contextmanager
def _written(path: str | Path) -> Iterator[IO[str]]:
    """Opens a file that appears only when it is complete. Raises UsageError if it cannot be written."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; expected a path in an existing folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


class ReplayedIncidents:
    """Runs the Desk over the instants and keeps the last state of every incident."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._incidents: dict[str, Incident] = {}
        self._seen = LastSeen()

    def observe(self, instant: Instant, findings: Sequence[Finding]) -> None:
        """Passes the findings of an instant to the Desk."""
        self._seen.record_instant(instant)
        seen = self._seen
        for change in self._desk.observe(instant.time, findings, seen.is_present, is_monitored=seen.has_sample):
            self._incidents[change.incident.id] = change.incident

    def open_level(self, finding: Finding) -> Level | None:
        """Returns the level of its condition in an open incident, None if it is in none."""
        return self._desk.open_level(finding)

    def incidents(self) -> list[Incident]:
        """Returns all incidents in order of their opening."""
        return sorted(self._incidents.values(), key=lambda i: (i.opened, i.id))
