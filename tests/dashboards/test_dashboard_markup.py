"""Pieces of HTML: what is dangerous is escaped, what is simulated says so, silence is never healthy."""

from __future__ import annotations

from dataclasses import replace

from dashboards import markup
from dashboards.answers import Fleet, Node
from dashboards.evidence import Ballot
from pipeline.model.records import SECOND

EVIL = '<script>alert("x")</script>'


def fleet(*states: str, simulated: bool = False) -> Fleet:
    nodes = tuple(Node(f"node:n{i}", "rack:r1", s, 0, simulated) for i, s in enumerate(states))  # type: ignore[arg-type]
    return Fleet(0, None, False, None, nodes)


def test_every_piece_escapes_what_comes_from_outside() -> None:
    pieces = [
        markup.badge(EVIL, EVIL),
        markup.title(EVIL, (), EVIL),
        markup.section(EVIL, EVIL),
        markup.notice(EVIL, EVIL, EVIL),
        markup.table((EVIL,), [(EVIL,)], EVIL),
        markup.table((), [], EVIL),
        markup.facts([(EVIL, EVIL)]),
        markup.chips([EVIL]),
        markup.vote(Ballot(EVIL, EVIL, EVIL, 3, 3)),
    ]
    assert not [piece for piece in pieces if "<script" in piece]


def test_the_headline_never_calls_silence_healthy() -> None:
    assert markup.headline(fleet("ok", "ok")) == "Nothing wrong on 2 nodes"
    assert markup.headline(fleet("ok", "no_data")) == "1 of 2 nodes silent, nothing wrong on the others"
    assert markup.headline(fleet("critical", "degraded", "no_data", "ok")) == (
        "1 critical and 1 degraded, 1 silent of 4 nodes"
    )
    assert markup.headline(fleet()) == "No node has reported yet"
    assert markup.headline(fleet("no_data", "no_data")) == "No node reports"
    assert markup.headline(replace(fleet("ok"), stalled=True)) == "Nothing was wrong on 1 node"


def test_the_banner_names_the_reasons_and_the_moment_only_while_nothing_comes_in() -> None:
    stuck = Fleet(100 * SECOND, None, True, None, (), newest=40 * SECOND, unready=(EVIL, "disk full"), stalled=True)
    told = markup.unready(stuck)
    assert "<script" not in told
    assert "<b>The pipeline does not take in telemetry:</b>" in told
    assert "; disk full. What is shown is as of 00:00:40Z." in told
    assert "as of 00:01:40Z." in markup.unready(replace(stuck, newest=900 * SECOND))  # a clock that is ahead
    assert "Nothing is stored yet." in markup.unready(replace(stuck, newest=None))
    partly = markup.unready(replace(stuck, stalled=False))
    assert "<b>The pipeline does not do all of its work:</b>" in partly
    assert "as of" not in partly


def test_counts_tell_how_many_are_simulated() -> None:
    assert "SIMULATED" in markup.tiles(fleet("critical", simulated=True))
    assert "SIMULATED" not in markup.tiles(fleet("critical"))


def test_a_vote_is_drawn_only_where_it_is_told_how_many_agree() -> None:
    told = markup.vote(Ballot("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, 7))
    assert told.count("fp-vote-yes") == 7
    assert told.count("fp-vote-no") == 1
    assert "All 7 others" in told
    untold = markup.vote(Ballot("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, None))
    assert "fp-vote-yes" not in untold
    assert "Most of 7 others" in untold


def test_a_vote_marks_where_the_results_differ() -> None:
    drawn = markup.vote(Ballot("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, None))
    assert "aaaa <mark>bbbb</mark>" in drawn
    assert "aaaa <mark>cccc</mark>" in drawn


def test_long_lists_are_counted_not_listed() -> None:
    assert "and 6 more" in markup.chips([str(i) for i in range(30)])
