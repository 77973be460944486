"""HTML fragments: text is escaped, simulation is marked, missing data is never healthy."""

from __future__ import annotations

from dataclasses import replace

from dashboards import markup
from dashboards.answers import Fleet, Node
from dashboards.evidence import Vote
from dashboards.links import Link
from pipeline.model.records import SECOND, from_iso

EVIL = '<script>alert("x")</script>'


def fleet(*states: str, simulated: bool = False) -> Fleet:
    nodes = tuple(Node(f"node:n{i}", "rack:r1", s, 0, simulated) for i, s in enumerate(states))  # type: ignore[arg-type]
    return Fleet(0, None, False, None, nodes)


def test_all_fragments_escape_text() -> None:
    pieces = [
        markup.badge(EVIL, EVIL),
        markup.title(EVIL, (), EVIL),
        markup.section(EVIL, EVIL),
        markup.notice(EVIL, EVIL, EVIL),
        markup.table((EVIL,), [(EVIL,)], EVIL),
        markup.table((), [], EVIL),
        markup.facts([(EVIL, EVIL)]),
        markup.chips([EVIL]),
        markup.vote_results(Vote(EVIL, EVIL, EVIL, 3, 3)),
    ]
    assert not [piece for piece in pieces if "<script" in piece]


def test_a_notice_shows_commands_as_code_and_nothing_as_markup() -> None:
    shown = markup.notice("is `fleetpulse executor` running? `<b>`")
    assert "<code>fleetpulse executor</code>" in shown
    assert "<code>&lt;b&gt;</code>" in shown


def test_nodes_without_data_are_never_healthy_in_the_headline() -> None:
    assert markup.headline(fleet("ok", "ok")) == "No problems on 2 nodes"
    assert markup.headline(fleet("ok", "no_data")) == "No data from 1 of 2 nodes, no problems on the others"
    assert markup.headline(fleet("critical", "degraded", "no_data", "ok")) == (
        "1 critical and 1 degraded of 4 nodes, 1 without data"
    )
    assert markup.headline(fleet()) == "No node has sent data yet"
    assert markup.headline(fleet("no_data", "no_data")) == "No data from any node"
    assert markup.headline(replace(fleet("ok"), stalled=True)) == "No problems on 1 node"


def test_the_banner_shows_the_reasons_and_while_stalled_the_time() -> None:
    stuck = Fleet(100 * SECOND, None, True, None, (), newest=40 * SECOND, unready=(EVIL, "disk full"), stalled=True)
    text = markup.unready(stuck)
    assert "<script" not in text
    assert "<b>Pipeline stalled:</b>" in text
    assert "; disk full. Data as of 00:00:40Z." in text
    assert "as of 00:01:40Z." in markup.unready(replace(stuck, newest=900 * SECOND))  # a clock that is ahead
    assert "No data is stored yet." in markup.unready(replace(stuck, newest=None))
    partly = markup.unready(replace(stuck, stalled=False))
    assert "<b>Pipeline degraded:</b>" in partly
    assert "as of" not in partly


def test_the_banner_has_times_and_durations_as_the_page_has_them() -> None:
    now = from_iso("2026-11-30T12:36:00Z")
    reasons = (
        "evaluation stalled for 42 s: the newest 2438 s of telemetry are not evaluated",
        "evaluated up to 2026-11-30T10:00:40.000000Z",
        "pending input without a commit since 2026-11-29T23:31:29.845454Z",
        "not a time: 2026-02-31T00:00:00Z",
    )
    text = markup.unready(Fleet(now, None, True, None, (), newest=now, unready=reasons, stalled=True))
    assert "stalled for 42 s: the newest 40 min of telemetry are not evaluated; evaluated up to 10:00:40Z; " in text
    assert "since 2026-11-29 23:31:29Z; not a time: 2026-02-31T00:00:00Z. Data as of 12:36:00Z." in text


def test_tiles_show_how_many_nodes_are_simulated() -> None:
    assert "SIMULATED" in markup.tiles(fleet("critical", simulated=True))
    assert "SIMULATED" not in markup.tiles(fleet("critical"))


def test_squares_are_drawn_only_if_the_number_of_agreeing_voters_is_known() -> None:
    text = markup.vote_results(Vote("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, 7))
    assert text.count("fp-vote-yes") == 7
    assert text.count("fp-vote-no") == 1
    assert "All 7 others" in text
    unknown = markup.vote_results(Vote("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, None))
    assert "fp-vote-yes" not in unknown
    assert "Most of 7 others" in unknown


def test_a_vote_marks_the_differences() -> None:
    drawn = markup.vote_results(Vote("gpu:n1.0", "aaaabbbb", "aaaacccc", 7, None))
    assert "aaaa <mark>bbbb</mark>" in drawn
    assert "aaaa <mark>cccc</mark>" in drawn


def test_long_lists_are_cut_and_counted() -> None:
    assert "and 6 more" in markup.chips([str(i) for i in range(30)])


def test_on_a_phone_a_wide_table_names_the_column_of_each_cell_and_leaves_out_empty_ones() -> None:
    made = markup.table(
        ("Act", "State", "User", "<b>Reason"), [("drain", "open", "ann", ""), (Link("r", "./x"), "", "", "y")], ""
    )
    assert 'class="fp-table fp-stacked"' in made
    assert '<td data-head="User"><span>ann</span></td>' in made
    assert '<td data-head="&lt;b&gt;Reason" data-empty><span></span></td>' in made
    assert "fp-stacked" not in markup.table(("Time", "What", "About"), [("1", "2", "3")], "")


def test_a_pipeline_that_compiles_its_detectors_is_not_called_stalled() -> None:
    new = Fleet(0, None, True, None, (), unready=("starting: detectors are compiled",), stalled=True)
    assert "<b>Pipeline not ready yet:</b> starting: detectors are compiled. No data" in markup.unready(new)
