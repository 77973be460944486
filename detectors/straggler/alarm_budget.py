"""False alarms that the detectors of slow ranks, GPUs and jobs cost, from their settings, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping

from detectors.base.budget import DAY_S, GPUS, budget_line, rule_line
from detectors.base.calibration import arl0
from detectors.base.streams import ALONE, Channel
from pipeline.model.records import SECOND


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
