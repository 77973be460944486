"""How fast a backlog is sent, with a clock set by the test."""

from __future__ import annotations

from collections import deque

import pytest

from agents.node.uplink.streams import CatchUpLimiter, SendStream
from pipeline.transport import Message, Partition, wire

SECOND = 1_000_000
START = 1_800_000_000 * SECOND
PARTITION = Partition("telemetry.v1", "n1", "ab" * 16)


def backlog(count: int, every: float = 1.0, start: int = START) -> SendStream:
    """A stream with `count` waiting messages, one made every `every` seconds."""
    made = [start + round(i * every * SECOND) for i in range(count)]
    values = [wire.seal(b"x", wire.TELEMETRY_KIND, bytes(16), i, sent) for i, sent in enumerate(made)]
    return SendStream(PARTITION, 0, deque(Message(PARTITION, i, value) for i, value in enumerate(values)))


def count_sent(
    limiter: CatchUpLimiter, stream: SendStream, seconds: float, begin: float = 1000.0, troubled: bool = False
) -> int:
    """Messages sent in the given seconds, with an iteration every half second."""
    count, turns = 0, round(seconds * 2)
    for turn in range(turns):
        now = begin + turn / 2
        limiter.update_link(now, troubled)
        while stream.ahead and limiter.allow(stream, now):
            stream.skip_next()
            count += 1
    return count


def test_a_backlog_is_sent_at_the_configured_multiple_of_real_time() -> None:
    assert count_sent(CatchUpLimiter(20.0), backlog(10_000), 60) == pytest.approx(20 * 60, rel=0.05)


@pytest.mark.parametrize("every", [0.1, 5.0, 60.0])
def test_the_multiple_is_measured_in_time_at_any_message_rate(every: float) -> None:
    assert count_sent(CatchUpLimiter(20.0), backlog(20_000, every), 60) == pytest.approx(20 * 60 / every, rel=0.1)


def test_a_node_without_backlog_is_never_delayed() -> None:
    limiter, stream = CatchUpLimiter(20.0, jitter=600.0, draw=lambda: 1.0), backlog(0)
    for second in range(120):
        stream.ahead.extend(backlog(1, start=START + second * SECOND).ahead)
        limiter.update_link(5000.0 + second, troubled=False)
        assert limiter.allow(stream, 5000.0 + second)
        stream.skip_next()


def test_during_a_problem_no_more_is_sent_than_produced() -> None:
    assert count_sent(CatchUpLimiter(20.0), backlog(10_000), 60, troubled=True) == pytest.approx(60, abs=3)


def test_after_a_problem_each_node_waits_its_own_random_share_of_the_jitter() -> None:
    for share in (0.0, 0.5, 1.0):
        limiter, stream = CatchUpLimiter(20.0, jitter=10.0, draw=lambda share=share: share), backlog(10_000)
        count_sent(limiter, stream, 5, troubled=True)
        expected = 10 * share + 20 * (30 - 10 * share)
        assert count_sent(limiter, stream, 30, begin=1005.0) == pytest.approx(expected, rel=0.08)


def test_a_gap_of_days_is_not_waited_for() -> None:
    limiter, stream = CatchUpLimiter(20.0), backlog(10)
    stream.ahead.extend(backlog(10, start=START + 3 * 86400 * SECOND).ahead)
    assert count_sent(limiter, stream, 6) == 20


def test_a_retry_costs_nothing() -> None:
    limiter, stream = CatchUpLimiter(20.0), backlog(1000)
    first = count_sent(limiter, stream, 10)
    stream.ahead = backlog(1000).ahead
    stream.allowance.seconds = 1e-9
    assert count_sent(limiter, stream, 0.5, begin=1010.0) >= first


def test_a_clock_set_back_delays_nothing() -> None:
    limiter, stream = CatchUpLimiter(20.0), backlog(10)
    stream.ahead.extend(backlog(100, start=START - 7200 * SECOND).ahead)
    assert count_sent(limiter, stream, 3) == 110


def test_without_limits_everything_is_sent_immediately() -> None:
    assert count_sent(CatchUpLimiter(), backlog(5000), 0.5) == 5000
