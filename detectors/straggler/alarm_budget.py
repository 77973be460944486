"""What the detectors of slow ranks, GPUs and jobs cost in false alarms, from their real settings, for people."""

from __future__ import annotations

from detectors.base.budget import DAY_S, GPUS, arl0, budget_line, rule_line
from detectors.base.streams import ALONE, Channel
from pipeline.model.records import SECOND


def rank_budget(times: Channel, clocks: Channel, ratio: float, steps: int) -> list[str]:
    """Of the detector `straggler`: what makes a suspect; a page needs a hold or what explains it."""
    slow = f"the median of {steps} steps, {ratio:g} times the stage's"
    return [_stream_line("compute time", times), _stream_line("SM clock", clocks), rule_line(slow)]


def gpu_budget(
    clocks: Channel, duty: Channel, jobs: tuple[Channel, Channel, int], ratio: float, hold: float
) -> list[str]:
    """Of `straggler_inferred`. jobs: bytes sent and SM activity of whole jobs, and how often those are looked at."""
    sent, active, look = jobs
    return [
        _stream_line("SM clock", clocks),
        _stream_line("SM activity", duty),
        *job_budget("bytes sent", sent, look),
        *job_budget("SM activity", active, look),
        rule_line(f"an SM clock below {ratio:g} of the peers' for {hold:g} s"),
    ]


def job_budget(name: str, channel: Channel, look: int, rules: str = "") -> list[str]:
    """One stream for each job, judged every `look` us beside its own past alone, and what else goes by `rules`."""
    step = look / SECOND
    threshold = channel.limit(step) + ALONE
    ticks = arl0(threshold) / (1 + channel.both)
    line = (
        f"{name} of whole jobs, one stream a job, without peers: threshold {threshold:.1f} at {step:g} s: a sound job "
        f"passes it once in {ticks:.2g} looks ({ticks * step / DAY_S / 365.25:,.0f} years)"
    )
    return [line, rule_line(rules)] if rules else [line]


def _stream_line(name: str, channel: Channel) -> str:
    return f"{name}: {budget_line(channel, GPUS)}"
