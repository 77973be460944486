"""How many defective GPUs canaries find in a day, a week and a month, and how many healthy ones they report.

    python -m benchmarks.detection.sdc_coverage --gpus 2000 --runs 1000000

Coverage is simulated: a defect shows in a share p of products, log-uniform over 1e-8 to 1, and is reached by a canary's
arithmetic at all with the odds of 0.4 (SDCHunter, OSDI 2026). Detector, ledger and pages are the real ones.
"""

from __future__ import annotations

import argparse
import sys
import time as clock
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.sdc.sdc import SdcVote
from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.topology import Topology

DECADES = (-8.0, 0.0)  # powers of ten of the share of products in which a defect shows [SDCHunter]
REACHED = 0.4  # synthetic tests find less than 40 % of defective GPUs [SDCHunter]
PRODUCTS = 130_000  # a day at 0.1 % of a GPU's time, as docs/canaries.md counts them
ROUND = 520  # products of a round
ASKED_AGAIN = 3
DAYS = (1, 7, 30)
GOAL = 0.30  # of all defective GPUs in 7 days
START = 1_790_000_000 * SECOND
DAY = 86_400 * SECOND
FLEET, SOUND = 20, 20  # defective GPUs of one fleet (AEGIS: 13 of some 10,000), and healthy ones as witnesses
_SENT = 3  # wrong rounds of a GPU that are sent to the detector: two page


@dataclass(frozen=True)
class Coverage:
    """Shares of all defective GPUs by days: wrong answers, suspected, paged; and the calculated share."""

    wrong: dict[int, float]
    suspected: dict[int, float]
    paged: dict[int, float]
    expected: dict[int, float]


def expected(days: float, products: float = PRODUCTS) -> float:
    """Returns (log10 n + 0.25) / 8 of the reachable faults: the mean of 1 - (1 - p)^n over log-uniform p."""
    return float(REACHED * (np.log10(products * days) + 0.25) / (DECADES[1] - DECADES[0]))


def measure_coverage(gpus: int, seed: int = 0, products: float = PRODUCTS) -> Coverage:
    """Runs fleets of FLEET defective GPUs with the real detector for a month."""
    rng = np.random.default_rng(seed)
    p = 10 ** rng.uniform(*DECADES, gpus) * (rng.random(gpus) < REACHED)
    errs = -np.expm1(ROUND * np.log1p(-np.minimum(p, 1 - 1e-12)))
    rounds = products / ROUND * DAYS[-1]
    with np.errstate(divide="ignore"):
        gaps = rng.geometric(np.maximum(errs, 1e-18)[:, None], (gpus, _SENT)).astype(float)
    when = np.cumsum(gaps, axis=1)
    seen = (when <= rounds) & (errs[:, None] > 0)
    again = rng.binomial(ASKED_AGAIN, np.minimum(p, 1.0)[:, None], (gpus, _SENT))
    first: dict[str, dict[str, int]] = {"suspect": {}, "page": {}}
    with np.errstate(invalid="ignore"):
        at = np.where(seen, START + when / rounds * DAYS[-1] * DAY, 0).astype(np.int64)
    for part in range(0, gpus, FLEET):
        mine = slice(part, part + FLEET)
        _watch(_months_events(part, at[mine], again[mine], seen[mine]), first)
    wrong = {d: _by_days(at[seen[:, 0], 0].tolist(), gpus)[d] for d in DAYS}
    by = {level: _by_days(list(times.values()), gpus) for level, times in first.items()}
    return Coverage(wrong, by["suspect"], by["page"], {d: expected(d, products) for d in DAYS})


def _watch(hours: list[tuple[int, list[Event]]], first: dict[str, dict[str, int]]) -> None:
    """Records when the detector first suspected and paged each GPU."""
    detector, topology = SdcVote(), Topology()
    for time, events in hours:
        for finding in detector.observe({"gpu": Frame(time, "gpu", (), {}, topology, tuple(events))}):
            if not finding.evidence.get("cleared"):
                for level in ("suspect", "page") if finding.level == "page" else ("suspect",):
                    first[level].setdefault(finding.entity, finding.time)


def _months_events(
    number: int, at: NDArray[np.int64], again: NDArray[np.int64], seen: NDArray[np.bool_]
) -> list[tuple[int, list[Event]]]:
    """Returns, by hours: wrong rounds, a right one of the same GPU after each, and healthy ones every six hours."""
    data = {"canary": "gpu.0", "version": "7", "expected": "right", "digest": "right"}
    events = [
        Event(START + hour * 3600 * SECOND, f"gpu:sound{i}.0", "digest", data)
        for hour in range(0, 24 * DAYS[-1], 6)
        for i in range(SOUND)
    ]
    for gpu, k in zip(*(line.tolist() for line in np.nonzero(seen)), strict=True):
        time, entity = int(at[gpu, k]), f"gpu:n{number + gpu}.0"
        answer = {"digest": f"wrong {gpu} {k}", "again": int(again[gpu, k])}
        events.append(Event(time, entity, "digest", {**data, **answer}))
        events.append(Event(time + 60 * SECOND, entity, "digest", {**data, "rounds": 1}))
    hours: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: (e.time, e.entity)):
        hours.setdefault(event.time // (3600 * SECOND), []).append(event)
    return [(events[-1].time, events) for _, events in sorted(hours.items())]


def _by_days(times: list[int], gpus: int) -> dict[int, float]:
    return {d: sum(t <= START + d * DAY for t in times) / gpus for d in DAYS}


def measure_false_alarms(runs: int, gpus: int = 10_000) -> tuple[list[Finding], float]:
    """Findings on healthy GPUs, and seconds of the detector: half known answers, half votes.

    Includes events that must not look like corruption: a software roll-out half way through, two drivers with
    different answers in votes, every hundredth result sent twice, and a hundredth of the agents that restart each
    round: they send their previous round again unchanged, and once more with the current time.
    """
    names = tuple(f"gpu:n{i // 8}.{i % 8}" for i in range(gpus))
    parents = {gpu: [gpu.replace("gpu:", "node:").rpartition(".")[0]] for gpu in names}
    drivers = {gpu: {"sku": "H100", "driver": "570" if i % 5 else "575"} for i, gpu in enumerate(names)}
    detector, topology = SdcVote(), Topology(parents, drivers)
    found, spent = list[Finding](), 0.0
    number, before = -(-runs // gpus), tuple[Event, ...]()
    for n in range(number):
        time = START + n * 1800 * SECOND
        result = _round(n, number, time, names)
        events, before = (*restarted_agents(n, time, before), *result), result
        began = clock.perf_counter()
        found += detector.observe({"gpu": Frame(time, "gpu", names, {}, topology, events)})
        spent += clock.perf_counter() - began
    return found, spent


def restarted_agents(n: int, time: int, before: tuple[Event, ...]) -> Iterator[Event]:
    """Yields repeated results of restarted agents for the previous round: a hundredth, changing each time."""
    for i, event in enumerate(before):
        if (i + 31 * n) % 100 == 0:
            yield event
            yield Event(time, event.entity, event.kind, event.data)


def _round(n: int, number: int, time: int, names: tuple[str, ...]) -> tuple[Event, ...]:
    """Returns one result of every GPU; `number` rounds in all."""
    events = []
    for i, gpu in enumerate(names):
        version = "8" if n > number * (0.4 + 0.2 * i / len(names)) else "7"
        if n % 2:
            data = {"canary": f"gpu.{n % 8}", "version": version, "digest": f"a{n % 8}", "expected": f"a{n % 8}"}
        else:
            driver = "570" if i % 5 else "575"
            data = {"canary": f"gpu-special.{n % 8}", "version": version, "digest": f"{version}/{driver}/{n % 8}"}
        events.append(Event(time + i, gpu, "digest", data))
        if (i + n) % 100 == 0:
            events.append(events[-1])
    return tuple(events)


def main() -> int:
    parser = argparse.ArgumentParser(description="coverage of canaries, simulated, and their false alarms")
    parser.add_argument("--gpus", type=int, default=2000, help="defective GPUs")
    parser.add_argument("--runs", type=int, default=1_000_000, help="results of healthy GPUs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure_coverage(options.gpus, options.seed)
    print("days  wrong answer     suspected         paged    arithmetic   (shares of all defective GPUs)")
    for d in DAYS:
        shares = found.wrong[d], found.suspected[d], found.paged[d], found.expected[d]
        print(f"{d:4}  " + "  ".join(f"{share:12.3f}" for share in shares))
    print(f"goal: {GOAL} suspected in 7 days")
    findings, seconds = measure_false_alarms(options.runs)
    print(f"{options.runs} results of healthy GPUs: {len(findings)} findings, {seconds:.1f} s")
    return int(bool(findings) or found.suspected[7] < GOAL)


if __name__ == "__main__":
    sys.exit(main())
