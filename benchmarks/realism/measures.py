"""Measures computed in the same way from real and simulated recordings: noise of ports, steps, error rates, hosts and
loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.realism.sample import Floats, Sample, in_time, kurtosis, phi, sample
from benchmarks.realism.series import SECONDS, coarse, matrix, rate, rolling_median

Lines = Mapping[str, Mapping[str, Floats]]

STEADY = 0.5
"""Deviations of a port's rate beyond this are starts, stops and dips, not noise; chosen."""
RATE_WINDOW, LOOP_WINDOW = 31, 61
"""Values whose middle is a rate's or a reading's level: about 6 min at 11 s, 1 min at 1 s; chosen."""
LEAST_TRAFFIC = 0.01
"""Share of the line rate above which a port counts as used for the noise of its rate; chosen."""
LOWEST_BER = 1e-15
"""Where log10 of an error rate is cut: no pre-FEC rate lies lower, a lower one is a counter that did not move."""
_DISTINCT = 10  # values that a host metric must have to be judged; chosen: two-state flags are not measurements


def deviations(rates: Floats, window: int = RATE_WINDOW) -> Floats:
    """Rate over the median around it, minus 1; NaN where a start, stop or dip is."""
    level = rolling_median(np.nan_to_num(rates), window)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.where(level > 0, rates / level - 1, np.nan)
    return np.where(np.abs(off) < STEADY, off, np.nan)


def port_noise(ports: Lines, line_rate: float, quiet: Iterable[float] = (), around: float = 0.0) -> dict[str, Sample]:
    """Deviations of each used direction of each port, but for `around` seconds beside the times in `quiet`."""
    found: dict[str, list[Floats]] = {}
    for name, columns in ports.items():
        times = columns[SECONDS][1:]
        near = np.zeros(len(times), bool)
        for moment in quiet:
            near |= np.abs(times - moment) < around
        for counter in ("nic.rx_bytes", "nic.tx_bytes"):
            rates = rate(columns[counter], columns[SECONDS])
            if np.nanmedian(rates) > LEAST_TRAFFIC * line_rate:
                found.setdefault(name, []).append(np.where(near, np.nan, deviations(rates)))
    return {name: in_time(lines) for name, lines in found.items()}


def step_factor(times: NDArray[np.float64]) -> Floats:
    """(steps,) how much longer than usual all ranks of a job computed together: the median rank's deviation."""
    return np.asarray(np.median(np.log(times) - np.median(np.log(times), axis=0), axis=1))


def own_noise(times: NDArray[np.float64]) -> Floats:
    """Returns (steps, ranks): a rank's deviation without the step's common factor."""
    off = np.log(times) - np.median(np.log(times), axis=0)
    return np.asarray(off - np.median(off, axis=1)[:, None])


def neighbours(names: Sequence[str], times: NDArray[np.float64], stages: Mapping[str, str]) -> Floats:
    """(steps, pairs) ln of the ratio of compute times of two ranks of one stage, at the same step."""
    places = [[i for i, n in enumerate(names) if stages.get(n) == stage] for stage in sorted(set(stages.values()))]
    pairs = [(a, b) for place in places for a, b in zip(place[::2], place[1::2], strict=False)]
    logs = np.log(times)
    return np.array([logs[:, a] - logs[:, b] for a, b in pairs]).T


def stage_factors(names: Sequence[str], times: NDArray[np.float64], stages: Mapping[str, str]) -> Floats:
    """(stages,) median compute time of each stage over the mean of the job's stages, minus 1."""
    found = sorted({stages[n] for n in names if n in stages})
    middle = [np.median(times[:, [i for i, n in enumerate(names) if stages.get(n) == s]]) for s in found]
    return np.array(middle) / np.mean(middle) - 1 if middle else np.empty(0)


def jobs_of(ranks: Lines) -> dict[str, dict[str, Mapping[str, Floats]]]:
    """job -> its ranks; a rank's name is that of its job and its number."""
    found: dict[str, dict[str, Mapping[str, Floats]]] = {}
    for name, columns in ranks.items():
        found.setdefault(name.split(":", 1)[1].split(".", 1)[0], {})[name] = columns
    return found


def job_steps(ranks: Lines) -> list[tuple[list[str], NDArray[np.float64]]]:
    """(names, compute times (steps, ranks)) of every job with steps."""
    found = [matrix(job, "rank.compute_time") for job in jobs_of(ranks).values()]
    return [(names, times) for names, times in found if times.size]


def since(line: Mapping[str, Floats], column: str, least: float) -> dict[str, Floats]:
    """Rows from where a column has reached a value on."""
    kept = line[column] >= least
    return {name: values[kept] for name, values in line.items()}


def ber(errors: Floats) -> Floats:
    """Decades of an error rate."""
    return np.asarray(np.log10(np.maximum(errors, LOWEST_BER)))


def levels(decades: Sequence[Floats]) -> Sample:
    return sample([float(np.nanmedian(line)) for line in decades])


def wander(decades: Sequence[Floats]) -> Sample:
    """Steps from hour to hour, of all ports."""
    return in_time([np.diff(line) for line in decades])


def persistence(lines: Sequence[Floats]) -> Sample:
    """Lag-1 autocorrelation of every line that moves."""
    return sample([phi(line) for line in lines])


def spreads(decades: Sequence[Floats]) -> Sample:
    """Standard deviation of each port."""
    return sample([float(np.nanstd(line)) for line in decades])


def moving(lines: Iterable[Floats]) -> list[Floats]:
    """Those with enough distinct values to be a measurement."""
    return [line for line in lines if len(np.unique(line[np.isfinite(line)])) >= _DISTINCT]


def restless(lines: Sequence[Floats]) -> Sample:
    """log10(excess kurtosis of a line's changes + 3): 0.48 for normal ones, more for calm with bursts."""
    each = [kurtosis(change[np.isfinite(change)]) for change in map(np.diff, lines)]
    return sample([float(np.log10(max(k + 3, 1.0))) for k in each if np.isfinite(k)])


def metrics(nodes: Lines, counters: set[str], per: int) -> list[Floats]:
    """Every metric of every node as means of `per` readings, counters as their growth."""
    found = []
    for columns in nodes.values():
        for name, values in columns.items():
            if name != SECONDS:
                line = rate(values, columns[SECONDS]) if name in counters else values
                found.append(coarse(line, per))
    return moving(found)


def loop_noise(loops: Lines, column: str) -> Sample:
    """Readings minus the median around them, in standard deviations of that difference."""
    lines = []
    for columns in loops.values():
        off = columns[column] - rolling_median(columns[column], LOOP_WINDOW)
        deviation = float(np.nanstd(off))
        if deviation > 0:
            lines.append(off / deviation)
    return in_time(lines)


def merged(found: Sequence[Sample]) -> Sample:
    """All series of several samples in one."""
    return in_time([line for one in found for line in one.series])
