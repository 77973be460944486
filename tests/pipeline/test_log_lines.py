"""Log lines of the pipeline on stderr have a time and a subject, as those of the agent."""

from __future__ import annotations

import io
import logging
import re

from pipeline.runtime import logs

FORM = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z "


def test_a_line_has_time_subject_and_text() -> None:
    stream = io.StringIO()
    handler = logs.log_to_stderr(stream)
    try:
        logging.getLogger("fleetpulse.kafka").warning("topic %s is not there", "x")
        logging.getLogger("fleetpulse.kafka").info("too fine")
        logging.getLogger("some.library").error("cannot listen")
    finally:
        logging.getLogger().removeHandler(handler)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(FORM + "kafka: topic x is not there", first)
    assert re.fullmatch(FORM + "some.library: cannot listen", second)


def test_lines_of_one_kind_are_limited_and_the_rest_is_counted() -> None:
    now = [0.0]
    limit = logs.RateLimit(lambda: now[0])

    def passes(text: str, value: int) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, (value,), None)
        return record.getMessage() if limit.filter(record) else None

    passed = [passes("cannot accept %d", i) for i in range(100_000)]
    assert passed[: logs.MAX_LINES] == [f"cannot accept {i}" for i in range(logs.MAX_LINES)]
    assert not any(passed[logs.MAX_LINES :])
    assert passes("something else %d", 1) == "something else 1"
    now[0] += logs.PERIOD_S
    assert passes("cannot accept %d", 7) == "cannot accept 7 (99980 similar lines dropped before)"


def test_the_number_of_counted_kinds_is_bounded() -> None:
    limit = logs.RateLimit()
    for i in range(3 * logs.MAX_KINDS):
        limit.filter(logging.LogRecord("x", logging.ERROR, "", 0, f"text {i}", (), None))
    assert len(limit._counts) == logs.MAX_KINDS
