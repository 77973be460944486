"""The scorer against a second one written from the protocol: brute force, no shared code, small cases."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.scoring.matching import match_alerts
from detectors.scoring.score import Alert, Alerts, Meta, Placement, Truth, score_run
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from tests.examples import examples

PARENTS = {"rank:7.0": ["job:7", "gpu:a"], "gpu:a": ["node:n"], "gpu:b": ["node:n"], "node:n": ["rack:r"]}
ABOVE = {
    "rank:7.0": {"job:7", "gpu:a", "node:n", "rack:r"},
    "gpu:a": {"node:n", "rack:r"},
    "gpu:b": {"node:n", "rack:r"},
    "node:n": {"rack:r"},
}
# kind -> level, detectors, kinds of cause, as in docs/scoring.md
HEAT_OR_SLOW = {"straggler", "straggler_inferred", "thermal", "thermal_edge"}
RULES = {
    "sdc": ("page", {"sdc", "sdc_replica"}, {"gpu", "node"}),
    "straggler": ("page", HEAT_OR_SLOW, {"rank", "gpu", "node"}),
    "cold_plate": ("ticket", HEAT_OR_SLOW, {"rank", "gpu", "node"}),
    "own": ("page", None, None),
}
SOFT_SDC = ("ticket", {"sdc", "sdc_replica", "sdc_gradient"}, {"gpu", "node"})
MINUTE = 60
WORLD = Placement(Topology(PARENTS))


@st.composite
def events(draw):
    number = draw(st.integers(0, 10**6))
    onset = draw(st.integers(0, 60)) * 10 * MINUTE
    length = draw(st.sampled_from([0, 5, 10, 30, 60, 600])) * MINUTE
    entity = draw(st.sampled_from(["gpu:a", "gpu:b", "node:n"]))
    cls = draw(st.sampled_from(["hard", "soft", "soft", "invisible", "benign"]))
    visible = onset + draw(st.sampled_from([0, 0, 0, 20])) * MINUTE
    effect = draw(st.sampled_from([None, 0.01, 0.5]))
    kind = draw(st.sampled_from(sorted(RULES)))
    micros = [SECOND * t for t in (onset, onset + length)]
    more = {"effect": effect, "effect_unit": "time"}
    return Truth(str(number), kind, entity, (entity,), *micros, cls, SECOND * visible, **more)


@st.composite
def alerts(draw):
    time = draw(st.integers(0, 120)) * 5 * MINUTE
    paged = draw(st.sampled_from([None, 0, 0, 0, 15]))
    cause = draw(st.sampled_from(["rank:7.0", "gpu:a", "gpu:b", "node:n", "rack:r"]))
    detector = draw(st.sampled_from(["sdc", "straggler", "thermal", "link"]))
    more = draw(st.lists(st.sampled_from(["gpu:a", "gpu:b", "node:n"]), max_size=3))
    incident = draw(st.sampled_from("xyz"))
    suspects = tuple(dict.fromkeys([cause, *more]))
    late = None if paged is None else (time + paged * MINUTE) * SECOND
    return Alert(incident, cause, detector, detector, suspects, time * SECOND, late)


def time_at(alert, level):
    return alert.paged if level == "page" else alert.ticketed


def counts_as(name, root):
    return name == root or (name == "rank:7.0" and root == "gpu:a")


def rule(event):
    return SOFT_SDC if (event.kind, event.detectability) == ("sdc", "soft") else RULES[event.kind]


def answers(alert, event):
    level, detectors, causes = rule(event)
    time = time_at(alert, level)
    return (
        event.detectability != "benign"
        and time is not None
        and event.onset - 60 * SECOND <= time <= event.end + 600 * SECOND
        and (detectors is None or alert.detector in detectors)
        and (causes is None or alert.cause.split(":")[0] in causes)
        and (
            counts_as(alert.cause, event.entity)
            or (event.detectability != "invisible" and alert.cause in ABOVE[event.entity])
        )
    )


def most_answered(some, alerts):
    """Returns the size of the best assignment, by trying all."""
    if not some or not alerts:
        return 0
    first, *rest = some
    best = most_answered(rest, alerts)
    for alert in alerts:
        if answers(alert, first):
            best = max(best, 1 + most_answered(rest, [a for a in alerts if a is not alert]))
    return best


CASES = (st.lists(events(), max_size=4, unique_by=lambda e: e.id), st.lists(alerts(), max_size=5))
FEW = settings(max_examples=examples(120), deadline=None)


@FEW
@given(*CASES)
def test_each_alert_answers_one_matching_event_and_no_event_is_lost(some, alerts):
    found = match_alerts(some, alerts, WORLD)
    assert all(answers(alerts[a], some[e]) for e, a in found.items())
    assert len(set(found.values())) == len(found)
    sought = [i for i, e in enumerate(some) if e.detectability in ("hard", "soft")]
    assert len([i for i in sought if i in found]) == most_answered([some[i] for i in sought], alerts)
    idle = [a for i, a in enumerate(alerts) if i not in found.values()]
    for e, a in found.items():
        level = rule(some[e])[0]
        earlier = [x for x in idle if answers(x, some[e]) and time_at(x, level) < time_at(alerts[a], level)]
        assert earlier == []


@FEW
@given(*CASES)
def test_the_order_of_the_lines_decides_only_between_equal_answers(some, alerts):
    one = score_run(some, Alerts(tuple(alerts)), WORLD, Meta(5.0))
    other = score_run(some[::-1], Alerts(tuple(alerts[::-1])), WORLD, Meta(5.0))
    assert one["found"] + one["small"]["found"] == other["found"] + other["small"]["found"]


def seconds(time):
    return time / SECOND


def by_hand(some, alerts, found):
    """Returns the figures for given answers."""
    delays, lengths = {}, {}
    for i, e in enumerate(some):
        lengths[i] = seconds(e.end - e.visible)
        if i in found:
            time = time_at(alerts[found[i]], rule(e)[0])
            if e.end > e.onset:
                time = min(time, e.end)
            delays[i] = seconds(max(0, time - e.visible))
    sought = [i for i, e in enumerate(some) if e.detectability in ("hard", "soft")]
    large = [i for i in sought if some[i].effect is None or some[i].effect >= 0.02]
    counted = [i for i in large if lengths[i] >= least(i, some, large, delays)]
    pages = {alerts[found[i]].incident for i in sought if i in found and pager(i, some, alerts, found) is not None}
    false = false_pages(some, alerts, found)
    return {
        "events": len(counted),
        "found": sum(i in found for i in counted),
        "small": len(sought) - len(counted),
        "delays": sorted(delays[i] for i in counted if i in found),
        "top1": sum(counts_as(alerts[found[i]].suspects[0], some[i].entity) for i in counted if i in found),
        "top3": sum(
            any(counts_as(s, some[i].entity) for s in alerts[found[i]].suspects[:3]) for i in counted if i in found
        ),
        "false": false,
        "precision": len(pages) / (len(pages) + false) if len(pages) + false else None,
    }


def middle(values):
    values = sorted(values)
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2


def least(i, some, large, delays):
    """Returns how long an event must last to count."""
    if some[i].detectability == "hard":
        return 0
    mine = [delays[j] for j in large if some[j].kind == some[i].kind and j in delays]
    return 600 + (min(1020, middle(mine)) if mine else 0)


def false_pages(some, alerts, found):
    count = 0
    for name in "xyz":
        mine = [i for i, a in enumerate(alerts) if a.incident == name]
        wrong = sorted(
            alerts[i].paged for i in mine if alerts[i].paged is not None and not is_free(i, mine, some, alerts, found)
        )
        while wrong:  # the first covers the alerts of the next 6 hours
            count, wrong = count + 1, [t for t in wrong if t > wrong[0] + 6 * 3600 * SECOND]
    return count


def is_free(i, mine, some, alerts, found):
    for e, a in found.items():
        if a == i and in_time(alerts[i].paged, some[e]):
            return True
        paged = pager(e, some, alerts, found)
        if a not in mine or paged is None or not in_time(alerts[i].paged, some[e]):
            continue
        if some[e].detectability == "invisible" and not answers(alerts[i], some[e]):
            continue
        if abs(alerts[i].paged - paged) <= 6 * 3600 * SECOND:
            return True
    return False


def in_time(time, event):
    return time is not None and event.onset - 60 * SECOND <= time <= event.end + 600 * SECOND


def pager(e, some, alerts, found):
    """Returns when the incident that answered an event paged about it."""
    answer = alerts[found[e]]
    if in_time(answer.paged, some[e]):
        return answer.paged
    matching = [a.paged for a in alerts if a.incident == answer.incident and answers(a, some[e])]
    return min((t for t in matching if in_time(t, some[e])), default=None)


@FEW
@given(*CASES)
def test_all_figures_match_the_second_scorer(some, alerts):
    result = score_run(some, Alerts(tuple(alerts)), WORLD, Meta(5.0))
    wanted = by_hand(some, alerts, match_alerts(some, alerts, WORLD))
    assert (result["events"], result["found"], result["false"]) == (wanted["events"], wanted["found"], wanted["false"])
    assert result["small"]["events"] == wanted["small"]
    assert result["precision"] == wanted["precision"]
    if wanted["delays"]:
        assert result["delay_median_s"] == pytest.approx(middle(wanted["delays"]))
        assert result["delay_p90_s"] == wanted["delays"][-(-9 * len(wanted["delays"]) // 10) - 1]
        assert result["top1"] * result["found"] == pytest.approx(wanted["top1"])
        assert result["top3"] * result["found"] == pytest.approx(wanted["top3"])
    else:
        assert (result["delay_median_s"], result["top1"]) == (None, None)
    assert sum(result["false_by_reason"].values()) == sum(result["false_by_detector"].values()) == result["false"]
    rows = result["attribution"].values()
    assert sum(itertools.chain.from_iterable(row.values() for row in rows)) == result["events"]
    assert Counter(e.detectability for e in some)["benign"] == result["not_sought"].get("benign", {}).get("events", 0)


@FEW
@given(st.lists(st.tuples(*CASES), min_size=1, max_size=4))
def test_merged_runs_have_the_sums_of_each(cases):
    from detectors.scoring.score import merge_scores

    results = [score_run(some, Alerts(tuple(alerts)), WORLD, Meta(5.0)) for some, alerts in cases]
    whole = merge_scores(results)

    def total(part):
        return sum(part(r) for r in results)

    assert whole["events"] + whole["small"]["events"] == total(lambda r: r["events"] + r["small"]["events"])
    assert whole["found"] + whole["small"]["found"] == total(lambda r: r["found"] + r["small"]["found"])
    for key in ("right", "false", "pages", "duplicates", "node_days"):
        assert whole[key] == total(lambda r, key=key: r[key])
