"""Templates of receivers: their loops end, and what people write goes on working."""

from __future__ import annotations

import re
import time

import pytest

from pipeline.model.errors import ConfigError
from pipeline.notify.receivers import Template
from tests.pipeline.test_receivers import alert, message

WORKING = [
    "{% for a in alerts %}{{ a.labels.site }}{% endfor %}",
    "{% for a in alerts[:5] if a.status == 'firing' %}{{ loop.index }} of {{ alerts|length }}{% endfor %}",
    "{% for k, v in commonLabels|items %}{{ k }}={{ v }}{% endfor %}",
    "{% for k, v in alerts[0]['annotations']|items %}{{ k }}={{ v }}{% endfor %}",
    "{% for key in ['site', 'incident'] %}{{ commonLabels[key] }}{% endfor %}",
    "{% for a in alerts|selectattr('status', 'equalto', 'firing')|sort(attribute='startsAt') %}{{ title }}{% endfor %}",
    "{% for text in alerts|map(attribute='annotations.summary')|unique %}{{ text }}{% endfor %}",
    "{% for state, members in alerts|groupby('status') %}{% for a in members %}{% for k, v in a.labels|items %}"
    "{{ state }}{{ k }}{% endfor %}{% endfor %}{% endfor %}",
    "{% for group in alerts|groupby('labels.site') %}{% for a in group.list %}{{ a.status }}{% endfor %}{% endfor %}",
    "{% for member in change.incident.members %}{{ member }}{% endfor %}",
]
ENDLESS = {
    "{% for a in title %}" * 5 + "{% endfor %}" * 5: "a loop over a text",
    "{% for a in alerts %}" * 3 + "{% endfor %}" * 3: "all alerts or members in a loop",
    "{% for a in alerts %}\n{{ alerts|tojson|length }}{% endfor %}": "line 2: all alerts or members in a loop",
    "{% for a in alerts %}{% for c in a.annotations.summary %}{% endfor %}{% endfor %}": "a loop over a text",
    "{% for c in alerts|tojson|list %}{% endfor %}": "a loop over a text",
    "{% for c in title|list %}{% endfor %}": "a loop over a text",
    "{% set alerts = title|list %}{% for a in alerts %}{% endfor %}": "sets alerts",
    "{% for s, m in alerts|groupby('status') %}{% set m = title %}{% for a in m %}{% endfor %}{% endfor %}": "text",
    "{% for k in commonLabels %}" * 4 + "{% endfor %}" * 4: "4 loops in each other",
    "{% for i in [" + "1," * 21 + "] %}{% endfor %}": "a loop over a text or another value",
    "{{ " + "(" * 4000: "is not a template",
}


@pytest.mark.parametrize("text", WORKING)
def test_a_loop_over_alerts_labels_or_members_works(text: str) -> None:
    shown = message(alerts=[alert(i) for i in range(9)], incident={"members": ["nic:n0.m"]})
    assert Template(text, "[[notify.slack]] r: text").render(shown, "FAILED") not in ("FAILED", "")


@pytest.mark.parametrize("text", ENDLESS)
def test_a_template_whose_loops_may_not_end_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match=ENDLESS[text]) as refused:
        Template(text, "[[notify.slack]] r: text")
    assert str(refused.value).startswith("[[notify.slack]] r: text: ")


def test_the_most_that_a_template_may_loop_ends_within_seconds() -> None:
    """1,000 alerts in groups, each label of each: the deepest that is allowed, with the filters that cost most."""
    text = (
        "{% for s, members in alerts|groupby('labels.entity') %}{% for a in members %}{% for k, v in a.labels|items %}"
        "{% if title|list|sort|length < 0 %}x{% endif %}{% endfor %}{% endfor %}{% endfor %}end"
    )
    began = time.monotonic()
    shown = message(alerts=[alert(i) for i in range(1000)])
    assert Template(text, "r").render(shown, "FAILED") == "end"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{{ 'a' * 100000000 }}", "'*' is only for numbers"),
        ("{{ title * 2 }}", "'*' is only for numbers"),
        ("{{ 2 ** 8 }}", "'**' for nothing"),
        ("{{ title.format(1) }}", "line 1: calls a function"),
        ("\n{% if alerts|length > 50 %}{{ f() }}{% endif %}", "line 2: calls a function"),
        ("{% macro m() %}x{% endmacro %}{{ m() }}", "calls a function, method or macro"),
        ("{% include 'x' %}", "names another template"),
        ("{% extends 'x' %}", "names another template"),
        ("{% from 'x' import y %}", "names another template"),
    ],
)
def test_a_template_that_can_never_be_rendered_ends_the_start(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        Template(text, "[[notify.slack]] r: text")


@pytest.mark.parametrize(
    "text",
    [
        "{{ alerts[0].labels.rack.x }}",
        "{{ change.incident.confidence * 100 }} %",
        "{{ change.incident.flaps * 2 }}",
        "{{ 'rack ' + alerts[0].labels.rack }}",
        "{{ (alerts|length) * 2 }}",
    ],
)
def test_a_template_that_fails_only_with_some_messages_is_accepted(text: str) -> None:
    Template(text, "[[notify.slack]] r: text")
