"""False alarms that the detectors of slow ranks, GPUs and jobs cost, from their settings, as lines for people."""

from __future__ import annotations

from detectors.base.budget import DAY_S, GPUS, budget_line, rule_line
from detectors.base.calibration import arl0
from detectors.base.streams import ALONE, Channel
from pipeline.model.records import SECOND


def rank_budget(times: Channel, clocks: Channel, ratio: float, steps: int) -> list[str]:
    """Returns the lines of `straggler`: what makes a suspect; a page needs a hold or a visible cause."""
    slow = f"the median of {steps} steps, {ratio:g} times the stage's"
    return [_stream_line("compute time", times), _stream_line("SM clock", clocks), rule_line(slow)]


def gpu_budget(clocks: Channel, activity: Channel, jobs: tuple[Channel, int], ratio: float, hold: float) -> list[str]:
    """Returns the lines of `straggler_inferred`.

    jobs: channel of the throughput of whole jobs, and the time between two evaluations (us).
    """
    return [
        _stream_line("SM clock", clocks),
        _stream_line("SM activity", activity),
        _stream_line("power", activity),
        *job_budget("throughput", *jobs),
        rule_line(f"an SM clock below {ratio:g} of the peers' for {hold:g} s"),
    ]


def job_budget(name: str, channel: Channel, every: int, rules: str = "") -> list[str]:
    """Returns the line of one stream per job, judged every `every` us against its own past, and that of its `rules`."""
    step = every / SECOND
    threshold = channel.limit(step) + ALONE
    ticks = arl0(threshold) / (1 + channel.both)
    line = (
        f"{name} of whole jobs, one stream per job, without peers: threshold {threshold:.1f} at {step:g} s: a healthy "
        f"stream exceeds it once in {ticks:.2g} ticks ({ticks * step / DAY_S / 365.25:,.0f} years)"
    )
    return [line, rule_line(rules)] if rules else [line]


def _stream_line(name: str, channel: Channel) -> str:
    return f"{name}: {budget_line(channel, GPUS)}"
