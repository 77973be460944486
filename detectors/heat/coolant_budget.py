"""What the thresholds of loops cost in false alarms: each is judged by its own past, at a higher threshold."""

from __future__ import annotations

from detectors.base.budget import DAY_S, arl0
from detectors.base.streams import ALONE, USUAL_STEP, Channel


def in_words(channel: Channel) -> str:
    """The budget of a loop's stream, such as that of one CDU, as one line."""
    threshold, sides = channel.limit(USUAL_STEP) + ALONE, 1 + channel.both
    run = arl0(threshold) / sides
    days = run * USUAL_STEP / DAY_S
    return (
        f"threshold {threshold:g} at {USUAL_STEP:g} s ({channel.threshold:g}, and {ALONE:g} more for what is judged by"
        f" its own past): a sound loop passes it once in {run:.2g} ticks ({days / 365.25:,.0f} years), which is at most"
        f" {1000 / days:.2g} suspects per 1,000 loop-days, before hold and corroboration"
    )
