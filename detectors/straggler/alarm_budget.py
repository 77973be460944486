"""What the detectors of slow ranks, GPUs and jobs cost in false alarms, from their real settings, for people."""

from __future__ import annotations

from detectors.base.budget import DAY_S, GPUS, arl0, budget_line, rule_line
from detectors.base.streams import ALONE, Channel
from pipeline.model.records import SECOND


def of_ranks(times: Channel, clocks: Channel, ratio: float, steps: int) -> list[str]:
    """Of the detector `straggler`: what makes a suspect; a page needs a hold or what explains it."""
    slow = f"the median of {steps} steps, {ratio:g} times the stage's"
    return [_each("compute time", times), _each("SM clock", clocks), rule_line(slow)]


def of_gpus(clocks: Channel, duty: Channel, jobs: tuple[Channel, Channel, int], ratio: float, hold: float) -> list[str]:
    """Of `straggler_inferred`. jobs: bytes sent and SM activity of whole jobs, and how often those are looked at."""
    sent, active, look = jobs
    return [
        _each("SM clock", clocks),
        _each("SM activity", duty),
        *of_jobs("bytes sent", sent, look),
        *of_jobs("SM activity", active, look),
        rule_line(f"an SM clock below {ratio:g} of the peers' for {hold:g} s"),
    ]


def of_jobs(name: str, channel: Channel, look: int, rules: str = "") -> list[str]:
    """One stream for each job, judged every `look` us beside its own past alone, and what else goes by `rules`."""
    step = look / SECOND
    threshold = channel.limit(step) + ALONE
    ticks = arl0(threshold) / (1 + channel.both)
    line = (
        f"{name} of whole jobs, one stream a job, without peers: threshold {threshold:.1f} at {step:g} s: a sound job "
        f"passes it once in {ticks:.2g} looks ({ticks * step / DAY_S / 365.25:,.0f} years)"
    )
    return [line, rule_line(rules)] if rules else [line]


def _each(name: str, channel: Channel) -> str:
    return f"{name}: {budget_line(channel, GPUS)}"
