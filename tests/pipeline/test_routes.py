"""Routes, groups and inhibition: Alertmanager's own tools agree, and a group survives a kill at every step."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.receivers import InhibitRule, Notify, Route, Webhook
from pipeline.incidents.silences import STORM_RECEIVERS
from pipeline.model.errors import ConfigError
from pipeline.notify.routes import build_rules, build_tree, match_all, parse_matchers
from tests.examples import examples
from tests.parts import do_without
from tests.pipeline.notifier_harness import Killed, NotifierHarness, Receiver, cut_at

NAMES = ("alertname", "severity", "rack")
VALUES = ("", "a", "b", "ab", "critical")


def hooks(receiver: Receiver | None = None, *names: str) -> tuple[Webhook, ...]:
    url = "https://x.example/" if receiver is None else f"http://127.0.0.1:{receiver.server_port}/"
    return tuple(Webhook(name, url) for name in names or ("r0",))


# --- matching -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels", "holds"),
    [
        ('severity="critical"', {"severity": "critical"}, True),
        ("severity=critical", {"severity": "critical"}, True),
        ('severity!="critical"', {}, True),
        ('rack=~"r1.*"', {"rack": "r12"}, True),
        ('rack=~"r1"', {"rack": "r12"}, False),
        ('rack!~"r1.*"', {"rack": "r2"}, True),
        ('rack=""', {}, True),
        ('{a="1", b=~"2|3"}', {"a": "1", "b": "3"}, True),
        ('{a="1",b="2"}', {"a": "1"}, False),
        (r'a="x\"y\\z"', {"a": 'x"y\\z'}, True),
    ],
)
def test_matchers_are_those_of_alertmanager(text: str, labels: dict[str, str], holds: bool) -> None:
    assert match_all(parse_matchers([text], "x"), labels) is holds


@pytest.mark.parametrize("text", ["severity", "=x", 'a="b', 'a=~"("', "a==b c", "1a=b", 'a="x" b="y"'])
def test_a_matcher_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[notify.route\] matchers"):
        parse_matchers([text], "[notify.route] matchers")


@st.composite
def trees(draw: st.DrawFn, depth: int = 0) -> dict[str, Any]:
    """A random tree of routes as in [notify.route]."""
    count = draw(st.integers(0, 3 if depth < 2 else 0))
    operator = st.sampled_from(["=", "!=", "=~", "!~"])
    matchers = draw(st.lists(st.tuples(st.sampled_from(NAMES), operator, st.sampled_from(VALUES)), max_size=2))
    return {
        "receiver": draw(st.sampled_from(["r0", "r1", "r2", "r3"])),
        "matchers": [f'{name}{op}"{value}"' for name, op, value in matchers] if depth else [],
        "continue": draw(st.booleans()) if depth else False,
        "routes": [draw(trees(depth + 1)) for _ in range(count)],
    }


def as_yaml(table: dict[str, Any]) -> str:
    """Returns alertmanager.yml of a tree; YAML reads JSON."""
    receivers = [{"name": f"r{i}"} for i in range(4)]
    return json.dumps({"route": table, "receivers": receivers})


def build(table: dict[str, Any]) -> Any:
    one = Route(receiver=table["receiver"], routes=tuple(table["routes"]))
    return build_tree(Notify(webhooks=hooks(None, "r0", "r1", "r2", "r3"), route=one))


@pytest.mark.alertmanager
@settings(max_examples=examples(60), derandomize=True)
@given(table=trees(), seed=st.integers(0, 999))
def test_alertmanagers_own_tool_routes_the_same_alerts_to_the_same_receivers(
    table: dict[str, Any], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if shutil.which("amtool") is None:
        do_without("alertmanager", "no amtool: run 'make parts'")
    path = tmp_path_factory.getbasetemp() / f"alertmanager-{seed}.yml"
    path.write_text(as_yaml(table))
    chosen = random.Random(seed)
    labels = {name: chosen.choice(VALUES[1:]) for name in NAMES if chosen.random() < 0.8}
    words = ["amtool", "config", "routes", "test", f"--config.file={path}", *(f"{k}={v}" for k, v in labels.items())]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert ran.returncode == 0, ran.stderr
    assert [node.receiver for node in build(table).match(labels)] == ran.stdout.strip().split(",")


def test_routes_inherit_and_keys_are_those_of_alertmanager() -> None:
    below: dict[str, Any] = {"matchers": ['severity="critical"'], "group_by": ["rack"], "group_wait": "1m30s"}
    top = Route(
        "r0", group_by=("alertname",), group_interval="1h", routes=({**below, "routes": [{"matchers": ["a=b"]}]},)
    )
    tree = build_tree(Notify(webhooks=hooks(), route=top))
    assert tree is not None
    (node,) = tree.match({"severity": "critical", "a": "b", "rack": "r1"})
    assert (node.wait_s, node.interval_s, node.repeat_s, node.group_by) == (90.0, 3600.0, 14_400.0, ("rack",))
    assert node.group_key({"rack": "r1", "a": "b"}) == '{}/{severity="critical"}/{a="b"}:{rack="r1"}'


@pytest.mark.parametrize(
    ("route", "text"),
    [
        (Route(), "receiver: missing"),
        (Route("nobody"), "not a receiver; known: r0"),
        (Route("r0", matchers=("a=b",)), "the first route gets every alert"),
        (Route("r0", routes=({"reciever": "r0"},)), "did you mean 'receiver'"),
        (Route("r0", routes=({"group_wait": "soon"},)), "not a duration"),
        (Route("r0", routes=({"group_by": ["..."], "routes": [{"receiver": "x"}]},)), "not a receiver"),
    ],
)
def test_a_route_with_a_mistake_ends_the_start(route: Route, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_rules(Notify(webhooks=hooks(), route=route))


# --- groups ---------------------------------------------------------------------------------------


@pytest.fixture
def grouped(tmp_path: Path, receiver: Receiver) -> Iterator[NotifierHarness]:
    """One receiver whose alerts are grouped by name: 30 s, 5 min, 4 h."""
    route = Route("r0", group_by=("alertname",))
    made = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), route=route))
    yield made
    made.close()


def posts(receiver: Receiver) -> list[tuple[str, str, int]]:
    """(reason, status, alerts) of each body."""
    return [(b["notification_reason"], b["status"], len(b["alerts"])) for _, b in receiver.posts]


def run_for(harness: NotifierHarness, seconds: int, step: int = 1) -> None:
    for _ in range(0, seconds, step):
        harness.send_due(step)


def test_a_group_whose_labels_look_like_the_end_of_a_key_keeps_the_intervals_of_its_route(
    tmp_path: Path, receiver: Receiver
) -> None:
    route = Route("r0", group_by=("cause",), group_wait="0s", group_interval="1m", repeat_interval="2m")
    made = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), route=route))
    made.write_change("opened", 'gpu:n1:{rack="x"}')
    run_for(made, 200, 10)
    assert [reason for reason, _, _ in posts(receiver)] == ["first notification", "repeat interval elapsed"]
    made.close()


# --- siblings with the same matchers --------------------------------------------------------------


def build_siblings(receiver: Receiver, *siblings: dict[str, Any]) -> Notify:
    """Routes below r0 that all match pages, each with `continue`."""
    same = {"matchers": ['severity="critical"'], "group_wait": "0s", "continue": True}
    route = Route("r0", group_by=("alertname",), routes=tuple({**same, **one} for one in siblings))
    return Notify(webhooks=hooks(receiver, "r0", "r1", "r2"), route=route)


@pytest.mark.parametrize("names", [("r1", "r2"), ("r2", "r1")])
def test_a_storm_goes_to_each_of_two_siblings_with_equal_matchers(receiver: Receiver, names: tuple[str, ...]) -> None:
    rules = build_rules(build_siblings(receiver, *({"receiver": name} for name in names)))
    pages = [node.receiver for node in rules.match({"severity": "critical"})]
    storm = {"severity": "critical", "alertname": "AlertStorm", STORM_RECEIVERS: "r1, r2"}
    assert pages == [node.receiver for node in rules.match(storm)] == list(names)


def test_siblings_with_the_same_matchers_have_intervals_of_their_own(tmp_path: Path, receiver: Receiver) -> None:
    slow = {"receiver": "r2", "group_interval": "5m", "repeat_interval": "9m"}
    fast = {"receiver": "r1", "group_interval": "20s", "repeat_interval": "40s"}
    for number, siblings in enumerate(((fast, slow), (slow, fast))):
        (tmp_path / str(number)).mkdir()
        made = NotifierHarness(tmp_path / str(number), [], build_siblings(receiver, *siblings))
        made.write_change("opened", "gpu:n1.0")
        heard: dict[str, list[str]] = {}
        for name in ("r1", "r2"):
            made.now, seen = made.incidents["gpu:n1.0"].opened, len(receiver.posts)
            for second in range(0, 640, 10):
                if second == 30 and name == "r1":
                    made.write_change("opened", "gpu:n2.0")
                made.send_due(10, name)
            heard[name] = [body["notification_reason"] for _, body in receiver.posts[seen:]]
        assert heard["r1"][:2] == ["first notification", "new alerts added"]
        assert 10 <= heard["r1"].count("repeat interval elapsed") <= 16
        assert heard["r2"] == ["first notification", "repeat interval elapsed"]
        made.close()


@pytest.mark.parametrize("order", [1, -1])
def test_siblings_with_one_receiver_and_other_labels_have_intervals_of_their_own(
    tmp_path: Path, receiver: Receiver, order: int
) -> None:
    fast = {"receiver": "r1", "group_by": ["cause"], "group_interval": "20s", "repeat_interval": "40s"}
    slow = {"receiver": "r1", "group_by": ["alertname", "none"], "group_interval": "5m", "repeat_interval": "9m"}
    made = NotifierHarness(tmp_path, [], build_siblings(receiver, *[fast, slow][::order]))
    made.write_change("opened", "gpu:n1.0")
    for second in range(0, 640, 10):
        if second == 320:
            made.restart()  # a stored group finds its route again
        made.send_due(10, "r1")
    counts = {name: sum(name in body["groupLabels"] for _, body in receiver.posts) for name in ("cause", "alertname")}
    assert 11 <= counts["cause"] <= 17
    assert counts["alertname"] == 2
    made.close()


def test_a_group_of_two_siblings_has_the_shorter_intervals(tmp_path: Path, receiver: Receiver) -> None:
    """As in Alertmanager, whose log of notifications is by receiver and group key."""
    slow, fast = {"group_interval": "5m", "repeat_interval": "9m"}, {"group_interval": "20s", "repeat_interval": "40s"}
    made = NotifierHarness(tmp_path, [], build_siblings(receiver, *({"receiver": "r1", **one} for one in (fast, slow))))
    made.write_change("opened", "gpu:n1.0")
    for _ in range(64):
        made.send_due(10, "r1")
    assert 11 <= len(receiver.posts) <= 17
    made.close()


def test_a_sibling_behind_one_without_continue_gives_its_intervals_to_no_group(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Alertmanager makes no group for it: the sibling before it takes every alert."""
    live = {"receiver": "r1", "continue": False, "group_interval": "5m", "repeat_interval": "1h"}
    dead = {"receiver": "r1", "group_interval": "20s", "repeat_interval": "40s"}
    made = NotifierHarness(tmp_path, [], build_siblings(receiver, live, dead))
    made.write_change("opened", "gpu:n1.0")
    heard = list[int]()
    for second in range(0, 600, 10):
        if second == 30:
            made.write_change("opened", "gpu:n2.0")
        if second == 400:
            made.restart()
        made.send_due(10, "r1")
        heard += [second] * (len(receiver.posts) - len(heard))
    assert [body["notification_reason"] for _, body in receiver.posts] == ["first notification", "new alerts added"]
    assert 290 <= heard[1] - heard[0] <= 310
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("days", [0, 8, 80])
def test_a_group_that_fired_when_old_rows_were_removed_goes_on_under_new_keys_and_is_resolved(
    grouped: NotifierHarness, receiver: Receiver, days: int
) -> None:
    grouped.write_change("opened", "gpu:n1.0")
    run_for(grouped, 40)
    grouped.pass_time(days * 86400)
    grouped.tidy()
    grouped.notifier._clean_outbox()
    grouped.write_change("opened", "gpu:n2.0")
    run_for(grouped, 400)
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        grouped.resolve(cause)
    run_for(grouped, 400)
    assert [status for _, status, _ in posts(receiver)][-1] == "resolved"
    keys = [key for key, _ in receiver.posts]
    assert len(set(keys)) == len(keys) >= 3


@pytest.mark.slow
def test_a_group_waits_then_reports_changes_at_its_interval_and_repeats(
    grouped: NotifierHarness, receiver: Receiver
) -> None:
    grouped.write_change("opened", "gpu:n1.0")
    run_for(grouped, 10)
    grouped.write_change("opened", "gpu:n2.0")
    run_for(grouped, 19)
    assert posts(receiver) == []
    run_for(grouped, 2)
    assert posts(receiver) == [("first notification", "firing", 2)]
    grouped.write_change("opened", "gpu:n3.0")
    run_for(grouped, 280, 10)
    assert len(posts(receiver)) == 1, "changes wait for group_interval"
    run_for(grouped, 30, 10)
    grouped.resolve("gpu:n1.0")
    run_for(grouped, 300, 10)
    for cause in ("gpu:n2.0", "gpu:n3.0"):
        grouped.resolve(cause)
    run_for(grouped, 300, 10)
    assert posts(receiver)[1:] == [
        ("new alerts added", "firing", 3),
        ("some alerts resolved", "firing", 3),
        ("all alerts resolved", "resolved", 2),
    ]
    run_for(grouped, 5 * 3600, 60)
    assert len(posts(receiver)) == 4
    assert {row[1] for row in grouped.rows()} == {"delivered"}


@pytest.mark.slow
def test_a_group_without_changes_is_repeated(grouped: NotifierHarness, receiver: Receiver) -> None:
    grouped.write_change("opened")
    run_for(grouped, 9 * 3600, 60)
    assert [reason for reason, _, _ in posts(receiver)] == ["first notification", *["repeat interval elapsed"] * 2]


@pytest.mark.slow
def test_an_alert_that_ends_within_group_wait_is_never_sent(grouped: NotifierHarness, receiver: Receiver) -> None:
    grouped.write_change("opened")
    run_for(grouped, 5)
    grouped.resolve()
    run_for(grouped, 400, 5)
    assert posts(receiver) == []
    assert {row[1] for row in grouped.rows()} == {"muted"}


@pytest.mark.slow
def test_what_waits_for_its_receiver_is_not_repeated(grouped: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [503] * 2000
    grouped.write_change("opened")
    run_for(grouped, 5 * 3600, 120)
    receiver.statuses = []
    run_for(grouped, 60)
    assert [r for r, _, _ in posts(receiver)][-1] == "first notification"
    assert [row for row in grouped.rows() if row[1] == "pending"] == []


def test_every_alert_has_its_own_group_with_three_dots(tmp_path: Path, receiver: Receiver) -> None:
    route = Route("r0", group_by=("...",), group_wait="0s")
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), route=route))
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("opened", cause)
    harness.send_due()
    assert posts(receiver) == [("first notification", "firing", 1)] * 2
    harness.close()


def test_a_page_goes_to_its_route_and_a_raised_ticket_moves_there(tmp_path: Path, receiver: Receiver) -> None:
    pages = {"receiver": "pager", "matchers": ['severity="critical"'], "group_wait": "0s", "group_by": ["..."]}
    route = Route("chat", group_by=("...",), group_wait="0s", routes=(pages,))
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver, "chat", "pager"), route=route))
    harness.write_change("opened", severity="ticket")
    for name in ("chat", "pager"):
        harness.send_due(name=name)
    harness.write_change("severity_raised", severity="page")
    for name in ("chat", "pager", "chat"):
        harness.send_due(310, name=name)
    heard = [(b["receiver"], b["status"]) for _, b in receiver.posts]
    assert heard == [("chat", "firing"), ("pager", "firing"), ("chat", "resolved")] or heard == [
        ("chat", "firing"),
        ("chat", "resolved"),
        ("pager", "firing"),
    ]
    harness.resolve()
    for name in ("chat", "pager"):
        harness.send_due(310, name=name)
    assert [(b["receiver"], b["status"]) for _, b in receiver.posts][3:] == [("pager", "resolved")]
    harness.close()


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("step", range(12))
def test_a_kill_at_any_commit_of_a_group_loses_nothing_and_repeats_only_the_same_key(
    grouped: NotifierHarness, receiver: Receiver, step: int
) -> None:
    """Before or after each transaction of the notifier the process ends; a new one goes on with the store."""
    grouped.write_change("opened", "gpu:n1.0")
    grouped.write_change("opened", "gpu:n2.0")
    cut_at(grouped, step)
    for second in range(0, 700, 10):
        try:
            if second == 320:
                grouped.resolve("gpu:n1.0")
                grouped.resolve("gpu:n2.0")
            grouped.send_due(10)
        except Killed:
            grouped.restart()
    bodies: dict[str, tuple[str, str, int]] = {}
    for key, body in receiver.posts:
        shown = (body["notification_reason"], body["status"], len(body["alerts"]))
        assert bodies.setdefault(key, shown) == shown, "a repeated key is the same message"
    assert list(bodies.values()) == [("first notification", "firing", 2), ("all alerts resolved", "resolved", 2)]
    assert {row[1] for row in grouped.rows()} == {"delivered"}


# --- inhibition -----------------------------------------------------------------------------------


@pytest.fixture
def inhibited(tmp_path: Path, receiver: Receiver) -> Iterator[NotifierHarness]:
    """Without routes; a page mutes tickets of the same site."""
    rule = InhibitRule(('severity="critical"',), ('severity="warning"',), ("site",))
    made = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), inhibit_rules=(rule,)))
    yield made
    made.close()


def test_an_inhibited_alert_is_sent_when_its_source_ends_first(inhibited: NotifierHarness, receiver: Receiver) -> None:
    inhibited.write_change("opened", "cdu:c1")
    inhibited.write_change("opened", "gpu:n1.0", severity="ticket")
    run_for(inhibited, 5)
    assert receiver.alerts == [("firing", "cdu:c1")]
    inhibited.resolve("cdu:c1")
    run_for(inhibited, 3)
    assert receiver.alerts[1:] in (
        [("resolved", "cdu:c1"), ("firing", "gpu:n1.0")],
        [("firing", "gpu:n1.0"), ("resolved", "cdu:c1")],
    )


def test_an_inhibited_alert_that_ends_first_is_never_sent(inhibited: NotifierHarness, receiver: Receiver) -> None:
    inhibited.write_change("opened", "cdu:c1")
    inhibited.write_change("opened", "gpu:n1.0", severity="ticket")
    run_for(inhibited, 2)
    inhibited.resolve("gpu:n1.0")
    run_for(inhibited, 2)
    inhibited.resolve("cdu:c1")
    run_for(inhibited, 2)
    assert receiver.alerts == [("firing", "cdu:c1"), ("resolved", "cdu:c1")]


def test_an_alert_that_was_sent_before_it_was_inhibited_is_resolved(
    inhibited: NotifierHarness, receiver: Receiver
) -> None:
    inhibited.write_change("opened", "gpu:n1.0", severity="ticket")
    run_for(inhibited, 2)
    inhibited.write_change("opened", "cdu:c1")
    inhibited.resolve("gpu:n1.0")
    run_for(inhibited, 2)
    assert ("resolved", "gpu:n1.0") in receiver.alerts


def test_a_group_whose_only_alert_was_sent_and_is_inhibited_now_sends_nothing_until_that_ends(
    tmp_path: Path, receiver: Receiver
) -> None:
    rule = InhibitRule(('cause="cdu:c1"',), ('cause="gpu:n1.0"',))
    route = Route("r0", group_by=("cause",), group_wait="0s", group_interval="1m")
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), route=route, inhibit_rules=(rule,)))
    harness.write_change("opened", "gpu:n1.0")
    run_for(harness, 5)
    harness.write_change("opened", "cdu:c1")
    run_for(harness, 200)
    assert receiver.alerts == [("firing", "gpu:n1.0"), ("firing", "cdu:c1")]
    harness.resolve("gpu:n1.0")
    run_for(harness, 200)
    assert receiver.alerts[2:] == [("resolved", "gpu:n1.0")]
    harness.close()


def test_what_is_held_for_long_delays_no_alert_that_is_written_after_it(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.notify.held_messages.MOST", 2)
    rules = [InhibitRule((f'cause="cdu:c{n}"',), (f'cause=~"gpu:n{n}.*"',)) for n in (1, 2)]
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver), inhibit_rules=tuple(rules)))
    harness.write_change("opened", "cdu:c1")
    for gpu in range(4):
        harness.write_change("opened", f"gpu:n1.{gpu}")
    harness.write_change("opened", "gpu:n2.0")
    run_for(harness, 4)
    assert receiver.alerts == [("firing", "cdu:c1"), ("firing", "gpu:n2.0")]
    harness.resolve("cdu:c1")
    run_for(harness, 6)
    assert sorted(receiver.alerts[2:]) == [*(("firing", f"gpu:n1.{gpu}") for gpu in range(4)), ("resolved", "cdu:c1")]
    assert harness.notifier._held["r0"].release(harness.now) is False
    harness.close()


def test_where_an_entity_is_stays_a_label_for_the_life_of_the_incident(tmp_path: Path, receiver: Receiver) -> None:
    place = {"rack": "r1", "node": "n1"}
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=hooks(receiver)))
    harness.notifier._planner._locate = lambda entity: dict(place)
    harness.write_change("opened")
    harness.restart()
    place["rack"] = "r2"
    harness.notifier._planner._locate = lambda entity: dict(place)
    harness.resolve()
    harness.send_due()
    harness.send_due()
    (firing, resolved) = (body["alerts"][0] for _, body in receiver.posts)
    assert firing["labels"]["rack"] == resolved["labels"]["rack"] == "r1"
    assert firing["fingerprint"] == resolved["fingerprint"]
    harness.close()


def test_a_held_message_of_routes_that_are_gone_is_sent(grouped: NotifierHarness, receiver: Receiver) -> None:
    grouped.write_change("opened")
    grouped.notify = Notify(webhooks=hooks(receiver))
    grouped.restart()
    run_for(grouped, 5)
    assert posts(receiver) == [("first notification", "firing", 1)]
    grouped.resolve()
    run_for(grouped, 65)
    assert [status for _, status, _ in posts(receiver)] == ["firing", "resolved"]


def test_a_backslash_before_any_other_character_stays_in_a_quoted_value() -> None:
    (site,) = parse_matchers([r'site=~"fra\..*"'], "[notify.route] matchers")
    assert site.holds("fra.1")
    assert not site.holds("frankfurt")
    (text,) = parse_matchers([r'job="a\"b\\c\nd"'], "[notify.route] matchers")
    assert text.value == 'a"b\\c\nd'
