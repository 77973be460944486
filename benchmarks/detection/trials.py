"""Separate trials for goals that the suites cannot measure: one line each for the table of goals.

    python -m benchmarks.detection.trials [--results DIR] [--only NAME ...] [--scale 1.0]

Bit error rates, replica digests and canary coverage are synthetic streams judged by the real detectors; the step of
thermal resistance is a simulated fleet. All use reported seeds. The lines are in DIR/trials.json for the
page, with the code that they are of and how much they stand on; trial results of smaller scale are in
DIR/trials_tried.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import detectors as kernel
from benchmarks.detection import link_rates, sdc_coverage, sdc_replica, thermal_resistance
from benchmarks.detection.fingerprint import fingerprint
from benchmarks.detection.tables import number, share

FILE, TRIED = "trials.json", "trials_tried.json"
Lines = Mapping[str, str]


def _of(number: int, scale: float) -> int:
    """Returns a share of a number, at least `least`."""
    return max(4, round(number * scale))


REPORTED_SEEDS, TUNING_SEEDS = (60, 61), (0, 1)
"""Seeds of trials for the page, not read before, and of smaller ones. Seeds below 60 are for work on detectors."""


def _seeds(scale: float) -> tuple[int, int]:
    """Returns seeds that are reported; a trial at smaller scale uses tuning seeds."""
    return REPORTED_SEEDS if scale >= 1 else TUNING_SEEDS


def link_errors(scale: float = 1.0) -> str:
    """Recall at two bit error rates, each within the required time: the usual one, and the worst."""
    said = []
    for ber in link_rates.DETECTED:
        found = [link_rates.delays(ber, _of(300, scale), _seeds(scale)[0], learnt) for learnt in link_rates.LEARNT]
        line = [found[-1], min(found[:-1], key=lambda d: d.recall)]
        said += [
            f"{word} R {share(d.recall)} at {d.as_text()}" for word, d in zip(("usual", "worst"), line, strict=True)
        ]
    return "; ".join(said)


def link_alarms(scale: float = 1.0) -> str:
    """False alarms of healthy links at two bit error rates."""
    return "; ".join(
        f"at {link_rates.alarms(ber, 3.0 * scale, _seeds(scale)[0]).as_text()}" for ber in link_rates.SOUND
    )


def canary_coverage(scale: float = 1.0) -> str:
    """Returns the defective GPUs that canaries find in a week, and findings on healthy ones."""
    results = _of(1_000_000, scale)
    found = sdc_coverage.measure_coverage(_of(4000, scale), _seeds(scale)[0])
    false_alarms, _ = sdc_coverage.measure_false_alarms(results)
    shares = f"{share(found.suspected[7])} suspected, {share(found.paged[7])} paged in 7 days"
    return f"{shares}; {len(false_alarms)} findings in {results:,} results of healthy GPUs"


def replica_digests(scale: float = 1.0) -> str:
    """Returns the lasting divergences that are paged within 1,000 steps."""
    row = sdc_replica.measured("lasting", _of(200, scale), _seeds(scale)[0])
    line = f"{share(row['paged'])} paged within 1,000 steps, median {number(row['median_steps'])}"
    return f"{line}, others accused {row['wrongly']:.0f}; wrong before the all-reduce: none"


def resistance(scale: float = 1.0) -> str:
    """A step of 15 % on single GPUs."""
    return thermal_resistance.figure(_seeds(scale), _of(60, scale))


def engine_cost(scale: float = 1.0) -> str:
    """The common kernel over a fleet."""
    spent, state, held = kernel.fleet_tick(_of(100_000, scale), 20, 256, 15)
    mine, copy = kernel.kernel_speed(_of(2_000_000, scale), 15)
    bytes_ = f"{state / 1e6:.0f} MB of state, {held / 1e6:.0f} MB with room to work in"
    return f"{spent:.2f} s of a core per tick, {bytes_}; kernel at {mine / copy:.2f} of memcpy"


TRIALS: Mapping[str, Callable[[float], str]] = {
    "link_errors": link_errors,
    "link_alarms": link_alarms,
    "canary_coverage": canary_coverage,
    "replica_digests": replica_digests,
    "resistance": resistance,
    "engine_cost": engine_cost,
}


STANDS_ON: Mapping[str, str] = {
    "link_errors": "300 links at each rate",
    "link_alarms": "3 days of each fleet",
    "canary_coverage": "4,000 defective GPUs",
    "replica_digests": "200 jobs",
    "resistance": "60 GPUs of each of 2 seeds",
    "engine_cost": "15 ticks, no seed",
}
"""N of each trial at scale 1."""


def read(folder: Path, code: str) -> Lines:
    """Returns the stored lines for the page, each with its N; lines measured with other code than `code` are marked."""
    return {name: _as_line(name, kept, code) for name, kept in _kept(folder / FILE).items() if name in TRIALS}


def _as_line(name: str, kept: object, code: str) -> str:
    known = kept if isinstance(kept, dict) else {"line": kept}
    old = "" if known.get("code") == code else ", measured with other code"
    return f"{known['line']} (N: {known.get('n', STANDS_ON[name])}{old})"


def write(folder: Path, name: str, line: str, scale: float) -> Path:
    """Adds a line, atomically. Results of smaller scale never reach the page."""
    path = folder / (FILE if scale >= 1 else TRIED)
    kept = {"line": line, "code": fingerprint(), "n": STANDS_ON[name], "scale": scale}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**_kept(path), name: kept}, indent=1))
    os.replace(partial, path)
    return path


def _kept(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="trials for the goals that the suites cannot show")
    parser.add_argument("--results", type=Path, default=Path(".score"))
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the size, to try it out; not for the page")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        line = TRIALS[name](options.scale)
        path = write(options.results, name, line, options.scale)
        print(f"{name}: {line}; {path}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
