"""Runs the suites run by run on several processes, and continues where it was stopped: `make score`.

    python -m benchmarks.detection.suite [--scale certified|training|small] [--hours H] [--processes N]
        [--results DIR] [--code FINGERPRINT] [--page FILE]

One result file per run and seed; a run that is under way leaves a checkpoint every CHECKPOINT_H of simulated time.
Finished runs are not repeated, unless code or scenario changed: results name the code, and those of other code do not
count. So a certification can be made in parts, on several machines one after another: commit the results (*.json.gz)
of each part, check out the same code elsewhere, start it again with that folder. `--hours 0` says what is missing.
The page is written from the results once all runs are finished; with --page at any time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from benchmarks.detection import results, trials
from benchmarks.detection.fingerprint import ROOT, fingerprint
from benchmarks.detection.judge import PARTS, judge
from benchmarks.detection.scenarios import FIRST_REPORTED, NAMES_OF_SCALES, Run, planned

CHECKPOINT_H = 6.0  # simulated hours that a kill costs at most: seconds to a minute of computing; chosen


@dataclass(frozen=True)
class Segment:
    """One run of a suite with one seed, and where its result goes."""

    run: Run
    seed: int
    folder: Path
    key: str
    code: str = ""

    @property
    def name(self) -> str:
        return f"{self.run.suite}-{self.run.name}-{self.run.nodes}x{self.run.days:g}-{self.run.world}"

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json.gz"

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.name}-{self.key}.checkpoint"

    def result(self) -> results.Result | None:
        """Returns the earlier result of this code and scenario."""
        found = results.read(self.file)
        return found if found is not None and found["key"] == self.key else None

    def other_code(self) -> str | None:
        """Returns the code of an earlier result that does not count; empty if it is not known, None without one."""
        found = results.read(self.file)
        return found.get("code", "") if found is not None and found["key"] != self.key else None


def segments(scale: str, folder: Path, code: str, first: int = FIRST_REPORTED) -> list[Segment]:
    """Returns all runs of a scale.

    code: fingerprint of what judges; first: the first reporting world, of a former certification.
    """
    runs = planned(scale, first)
    return [Segment(run, seed, folder, results.key_of(run.scenario(), seed, code), code) for run, seed in runs]


def describe_missing(every: Sequence[Segment], missing: Sequence[Segment]) -> str:
    """Returns how many runs are missing, and of which other code there are results, which are replaced."""
    others = Counter(code for segment in missing if (code := segment.other_code()) is not None)
    said = ", ".join(f"{count} of {code or 'unknown code'}" for code, count in sorted(others.items()))
    days = sum(segment.run.node_days for segment in missing)
    text = f"{len(missing)} of {len(every)} runs are missing, {days:.0f} node-days"
    return f"{text}; results of other code do not count: {said}" if said else text


def work(segment: Segment, until: float) -> bool:
    """Evaluates a segment and writes its result; False if the time was up before its end."""
    for old in segment.folder.glob(f"{segment.name}-*.checkpoint"):
        if old != segment.checkpoint:
            old.unlink()
    judged = judge(
        segment.run.scenario(), segment.seed, segment.checkpoint, CHECKPOINT_H, lambda _: time.time() < until
    )
    if judged is None:
        return False
    results.write(segment.file, results.result_of(judged, segment.key, segment.code))
    return True


def print_progress(line: str) -> None:
    """Writes progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def run(
    todo: Sequence[Segment], processes: int, until: float, print_line: Callable[[str], None] = print_progress
) -> None:
    """Processes the segments, with a line for each."""
    total, done, began = sum(s.run.node_days for s in todo), 0.0, time.time()
    for number, segment in enumerate(_finished(todo, processes, until), 1):
        result = segment.result()
        assert result is not None, f"{segment.file}: was written and is not there"
        spent, done = sum(result["seconds"].values()), done + segment.run.node_days
        left = (time.time() - began) * (total - done) / done
        print_line(
            f"{number} of {len(todo)}: {segment.name}: {result['node_days']:.0f} node-days, "
            f"{result['node_days'] / spent:.1f} a core-second, {len(result['truth'])} events; "
            f"{done:.0f} of {total:.0f} node-days, about {left / 60:.0f} min left"
        )


def _finished(todo: Sequence[Segment], processes: int, until: float) -> Iterator[Segment]:
    """Yields segments in the order in which they end; unfinished ones are left out."""
    waiting = list(reversed(todo))
    context = multiprocessing.get_context("spawn")  # numpy's threads do not survive a fork
    with ProcessPoolExecutor(processes, context) as pool:
        busy: dict[Future[bool], Segment] = {}
        while busy or (waiting and time.time() < until):
            while waiting and len(busy) < processes and time.time() < until:
                segment = waiting.pop()
                busy[pool.submit(work, segment, until)] = segment
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                segment = busy.pop(future)
                if future.result():
                    yield segment


def describe_rates(found: Sequence[results.Result]) -> str:
    """Returns node-days per core-second, by part."""
    days = sum(r["node_days"] for r in found)
    spent = {part: sum(r["seconds"][part] for r in found) for part in PARTS}
    parts = ", ".join(f"{part} {days / seconds:.1f}" for part, seconds in spent.items() if seconds)
    return f"node-days per core-second: {days / sum(spent.values()):.2f} in all; {parts}"


def main() -> int:
    parser = argparse.ArgumentParser(description="judge the simulated suites and write docs/detection.md")
    parser.add_argument("--scale", choices=NAMES_OF_SCALES, default="certified")
    parser.add_argument("--hours", type=float, default=float("inf"), help="stop after so many; the next run continues")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path(".score"))
    parser.add_argument("--code", metavar="FINGERPRINT", help="of the frozen code whose results count")
    parser.add_argument(
        "--first-world", type=int, default=FIRST_REPORTED, help="of a former certification, to write its page"
    )
    parser.add_argument("--page", type=Path, help="file of the page (docs/detection.md, once all runs are finished)")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    now = fingerprint()
    code = options.code or now
    every = segments(options.scale, options.results, code, options.first_world)
    missing = [s for s in every if s.result() is None]
    print_progress(f"code {now}" + (f"; results of {code} count" if options.code else ""))
    print_progress(describe_missing(every, missing))
    run(missing if code == now else [], options.processes, time.time() + options.hours * 3600)
    found = [(s.run, s.seed, result) for s in every if (result := s.result()) is not None]
    if not found:
        print_progress(f"no run is finished in {options.hours:g} h: increase --hours; started runs continue next time")
        return 1
    print_progress(describe_rates([result for _, _, result in found]))
    if len(found) < len(every) and options.page is None:
        print_progress(f"{len(found)} of {len(every)} runs: no page is written without --page FILE")
        return 0
    from benchmarks.detection import ablations  # here, as the page: those who only judge need neither
    from benchmarks.detection.page import Beside, page

    beside = Beside(trials.read(options.results, code), ablations.read(options.results, code))
    file = options.page or ROOT / "docs" / "detection.md"
    file.write_text(page(options.scale, code, found, len(every), beside))
    print_progress(f"{file}: {len(found)} of {len(every)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
