"""The pipeline's lines on stderr bear the time and the subject, as the agent's do."""

from __future__ import annotations

import io
import logging
import re

from pipeline import talk

FORM = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z "


def test_a_line_has_time_subject_and_text() -> None:
    stream = io.StringIO()
    handler = talk.to_stderr(stream)
    try:
        logging.getLogger("fleetpulse.kafka").warning("topic %s is not there", "x")
        logging.getLogger("fleetpulse.kafka").info("too fine")
        logging.getLogger("some.library").error("cannot listen")
    finally:
        logging.getLogger().removeHandler(handler)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(FORM + "kafka: topic x is not there", first)
    assert re.fullmatch(FORM + "some.library: cannot listen", second)
