"""False alarms of a threshold: how they follow from [detector.NAME] threshold, as text.

Siegmund (1985), Sequential Analysis, section 2.6: a CUSUM of slack k and threshold h over independent normal samples
has ARL0 = (exp(2kb) - 2kb - 1) / (2k^2), b = h + 1.166; it agrees with the exact Markov chain to 1 %. Clipped samples
with heavier tails than normal ones have a longer ARL0 (three times for Student-t4 at h = 18), so it is a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from detectors.base.calibration import arl0
from detectors.base.streams import ALONE, SLACK, USUAL_STEP, Channel
from pipeline.model.records import SECOND

DAY_S = 86_400.0
GPUS = 8  # per node: figures per 1,000 node-days are for nodes with 8 GPUs


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """False statistical suspects of one detector, before hold and corroboration remove most of them.

    threshold: at `step` s.   arl0: mean number of ticks between false alarms of one healthy stream.
    streams:   per 8-GPU node.   per_1000: suspects per 1,000 node-days, at most.
    """

    threshold: float
    step: float
    arl0: float
    streams: int
    per_1000: float


def threshold_for(ticks: float, slack: float = SLACK) -> float:
    """Returns the threshold with that ARL0, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if arl0(middle, slack) < ticks else (low, middle)
    return (low + high) / 2


def false_alarms(threshold: float, streams: int, step: float = USUAL_STEP, sides: int = 1) -> FalseAlarms:
    """Returns the false alarms of `streams` healthy streams of a node at a threshold and a tick of `step` s.

    sides: 2 where less than normal is harm too: either of two sums may exceed it.
    """
    run = arl0(threshold) / sides
    return FalseAlarms(threshold, step, run, streams, 1000 * streams * DAY_S / step / run)


def rule_line(what: str) -> str:
    """Returns the line of a detector without statistics. what: what its rule is about."""
    return f"a rule on {what}: no statistical alarm rate"


def budget_line(channel: Channel, streams: int, step: float = USUAL_STEP) -> str:
    """Returns the false alarms of a channel as one line."""
    threshold, sides = channel.limit(step), 1 + channel.both
    one, alone = false_alarms(threshold, streams, step, sides), arl0(threshold + ALONE) / sides
    years = one.arl0 * step / DAY_S / 365.25
    return (
        f"threshold {round(threshold, 1):g} at {step:g} s: a healthy stream exceeds it once in {one.arl0:.2g} ticks"
        f" ({years:,.0f} years); with {streams} stream{'' if streams == 1 else 's'} per node at most"
        f" {one.per_1000:.2g} suspects per 1,000 node-days, before hold and corroboration; without peers once in"
        f" {alone:.2g} ticks"
    )


def list_alarms(streams: Mapping[str, Channel], jobs: tuple[str, Channel, int] | None, rules: str) -> list[str]:
    """Returns the lines of a detector: what makes a suspect; a page needs a hold or a visible cause.

    streams: channels by metric.   jobs: metric of whole jobs, one stream per job without peers, its channel, and the
    time between two evaluations (us).   rules: what has no statistical alarm rate.
    """
    lines = [f"{name}: {budget_line(channel, GPUS)}" for name, channel in streams.items()]
    if jobs is not None:
        name, channel, every = jobs
        step, threshold = every / SECOND, channel.limit(every / SECOND) + ALONE
        ticks = arl0(threshold) / (1 + channel.both)
        lines.append(
            f"{name} of whole jobs, one stream per job, without peers: threshold {threshold:.1f} at {step:g} s: a "
            f"healthy stream exceeds it once in {ticks:.2g} ticks ({ticks * step / DAY_S / 365.25:,.0f} years)"
        )
    return [*lines, rule_line(rules)]
