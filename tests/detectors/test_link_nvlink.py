"""NVLinks: bursts and streams of errors, links that slow down or go down, the driver's log, and which end it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from detectors.link.link_nvlink import LinkNvlink
from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.signals import class_of_entity
from tests.detectors.cases.case import START
from tests.detectors.cases.link_nvlink import LINKS, topology, values

Values = dict[str, np.ndarray]


def time_at(tick: int) -> int:
    return START + tick * 10 * SECOND


def run_detector(
    change: Callable[[int, Values], object], events: Sequence[Event] = (), ticks: int = 150
) -> list[Finding]:
    detector, site, found = LinkNvlink(), topology(), []
    for tick in range(ticks):
        shown = values(tick)
        change(tick, shown)
        frames = {"nvlink": Frame(time_at(tick), "nvlink", LINKS, shown, site)}
        now = [e for e in events if time_at(tick) <= e.time < time_at(tick + 1)]
        for c in {class_of_entity(e.entity) for e in now}:
            mine = tuple(e for e in now if class_of_entity(e.entity) == c)
            frames[c] = Frame(time_at(tick), c, tuple(e.entity for e in mine), {}, site, mine)
        found += detector.observe(frames)
    return found


def xid(tick: int, entity: str = "gpu:n0.2", **data: object) -> Event:
    return Event(
        time_at(tick), entity, "xid", {"xid": 74, "class": "nvlink", "severity": "critical", "text": "x", **data}
    )


def sxid(tick: int, **data: object) -> Event:
    facts = {
        "sxid": 20001,
        "severity": "warning",
        "switch": "nvidia-nvswitch0",
        "fatal": False,
        "text": "Link 3 TX Replay Error",
    }
    return Event(time_at(tick), "node:n0", "sxid", {**facts, **data})


def nothing(tick: int, shown: Values) -> None:
    pass


def test_one_burst_is_a_suspect_and_a_second_window_pages() -> None:
    def burst(tick: int, shown: Values) -> None:
        shown["nvlink.crc_errors"][5] += 500.0 * (tick >= 60)

    assert {(f.entity, f.level) for f in run_detector(burst)} == {(LINKS[5], "suspect")}

    def twice(tick: int, shown: Values) -> None:
        burst(tick, shown)
        shown["nvlink.crc_errors"][5] += 500.0 * (tick >= 66)

    found = run_detector(twice)
    page = next(f for f in found if f.level == "page")
    assert page.time - time_at(60) <= 120 * SECOND
    assert page.evidence["errors"] == {"nvlink.crc_errors": 1000}
    assert page.evidence["which_end"].startswith("unknown")


def test_rare_replays_are_not_reported() -> None:
    def rare(tick: int, shown: Values) -> None:
        shown["nvlink.replay_errors"] += np.arange(len(LINKS)) == tick // 30

    assert run_detector(rare) == []


def test_a_link_that_goes_down_pages_once_confirmed() -> None:
    def out(tick: int, shown: Values) -> None:
        shown["nvlink.state"][4] = 0.0 if tick >= 60 else 1.0

    found = run_detector(out)
    assert {(f.entity, f.level) for f in found} == {(LINKS[4], "page")}
    assert found[0].time == time_at(62)
    assert found[0].onset == time_at(60)
    assert found[0].signals == ("nvlink.state",)


def test_a_link_that_loses_speed_pages_and_one_that_sleeps_does_not() -> None:
    def slower(tick: int, shown: Values) -> None:
        shown["nvlink.state"][7] = 2.0 if tick % 20 > 10 else 1.0  # sleep
        shown["nvlink.speed"][4] *= 0.6 if tick >= 60 else 1.0

    found = run_detector(slower)
    assert {(f.entity, f.level) for f in found} == {(LINKS[4], "page")}
    assert "40 % slower" in found[0].summary


def test_links_that_were_never_up_are_not_judged() -> None:
    def never(tick: int, shown: Values) -> None:
        shown["nvlink.state"][4] = 0.0

    assert run_detector(never) == []


def test_several_links_blame_the_gpu_and_half_of_the_gpus_the_node() -> None:
    def links_down(links: list[int]) -> Callable[[int, Values], None]:
        def out(tick: int, shown: Values) -> None:
            shown["nvlink.state"][links] = 0.0 if tick >= 60 else 1.0

        return out

    found = run_detector(links_down([4, 5]))
    assert {f.entity for f in found} == {"gpu:n0.2"}
    assert "its end" in found[0].evidence["which_end"]
    found = run_detector(links_down([0, 2, 4]))
    assert {f.entity for f in found} == {"node:n0"}
    assert "NVSwitch or the board" in found[0].evidence["which_end"]


def test_a_message_alone_is_a_suspect_and_one_with_errors_pages() -> None:
    found = run_detector(nothing, [xid(60)])
    assert {(f.entity, f.level) for f in found} == {("gpu:n0.2", "suspect")}

    def few(tick: int, shown: Values) -> None:
        shown["nvlink.recovery_errors"][5] += 3.0 * (tick >= 61)

    assert {(f.entity, f.level) for f in run_detector(few, [xid(60)])} == {
        ("gpu:n0.2", "suspect"),
        ("gpu:n0.2", "page"),
    }


def test_a_repeated_message_pages_and_harmless_ones_never_do() -> None:
    assert {f.level for f in run_detector(nothing, [xid(60), xid(70)])} == {"suspect", "page"}
    quiet = [xid(60, severity="info"), xid(70, root={"xid": 79}), xid(80, xid=31, **{"class": "application"})]
    assert run_detector(nothing, quiet) == []


def test_the_end_is_known_only_if_one_of_them_logs_messages() -> None:
    found = run_detector(nothing, [xid(60), sxid(60)])
    assert {(f.entity, f.level) for f in found} == {("gpu:n0.2", "suspect")}  # of one moment: one burst
    assert found[0].evidence["which_end"] == "unknown: GPU and nvidia-nvswitch0 both logged messages"
    found = run_detector(nothing, [sxid(60, fatal=True, severity="critical")])
    assert {(f.entity, f.level) for f in found} == {("node:n0", "page")}
    assert "only nvidia-nvswitch0 logged messages" in found[0].evidence["which_end"]


@pytest.mark.parametrize("kind", ["maintenance", "reset"])
def test_maintenance_and_resets_do_not_page(kind: str) -> None:
    def away(tick: int, shown: Values) -> None:
        shown["nvlink.state"][:8] = 0.0 if 60 <= tick < 90 else 1.0
        shown["nvlink.crc_errors"][:8] += 90.0 * (tick >= 70)

    events = [Event(time_at(59), f"gpu:n0.{g}", "reset", {}) for g in range(4)]
    if kind == "maintenance":
        events = [Event(time_at(59), "node:n0", "maintenance_start", {"seconds": 300.0})]
    assert [f for f in run_detector(away, events, 120) if f.level == "page"] == []


def test_restarted_and_missing_counters_are_not_errors() -> None:
    def malformed(tick: int, shown: Values) -> None:
        shown["nvlink.crc_errors"][:] = 1000.0 - tick  # falls with each reading
        shown["nvlink.replay_errors"][3] = np.nan if tick % 2 else 7.0
        shown["nvlink.recovery_errors"][9] = 5000.0 * (tick >= 60)
        shown["nvlink.generation"] = np.where(tick >= 60, 2.0, 1.0) * np.ones(len(LINKS))
        if tick > 100:
            for column in shown.values():
                column[12:] = np.nan

    assert run_detector(malformed) == []


@pytest.mark.parametrize("top", [2.0**8 - 1, 2.0**16 - 1, 2.0**32 - 1, 2.0**64, -1.0, np.inf])
def test_unreadable_values_are_not_errors(top: float) -> None:
    def malformed(tick: int, shown: Values) -> None:
        if 60 <= tick <= 62 or 66 <= tick <= 68:
            shown["nvlink.crc_errors"][:4] = top

    assert run_detector(malformed) == []


def test_a_counter_reported_by_two_sources_in_turn_does_not_grow() -> None:
    def flips(tick: int, shown: Values) -> None:
        shown["nvlink.crc_errors"][5] = 10_000.0 if tick // 4 % 2 else 9000.0

    assert run_detector(flips) == []


def test_a_link_that_vanished_with_errors_is_cleared() -> None:
    def gone(tick: int, shown: Values) -> None:
        shown["nvlink.crc_errors"][5] += 100.0 * max(0, tick - 60)
        if tick >= 70:
            for column in shown.values():
                column[5] = np.nan

    found = run_detector(gone, ticks=300)
    assert found
    assert found[-1].time < time_at(70 + 70)


def test_repeated_frames_change_nothing() -> None:
    """Compared with a detector whose counters skip no repeated frame."""
    site, quick, slow = topology(), LinkNvlink(), LinkNvlink()
    for tick in range(120):
        shown = values(tick)
        shown["nvlink.state"][4] = 0.0 if tick in (70, 71) or tick >= 100 else 1.0
        shown["nvlink.speed"][7] *= 0.6 if 80 <= tick < 90 else 1.0
        frames = {"nvlink": Frame(time_at(tick), "nvlink", LINKS, shown, site)}
        slow.restore(slow.snapshot())
        assert quick.observe(frames) == slow.observe(frames)
        assert np.array_equal(quick.links, slow.links)


@pytest.mark.parametrize("malformed", [[74], {"a": 1}, None, float("inf"), 10**30, "74"])
def test_messages_with_malformed_data_cause_no_error(malformed: object) -> None:
    message = [
        xid(60, xid=malformed, **{"class": malformed}),
        xid(61, detail={"link": malformed}),
        xid(62, text=malformed),
        sxid(63, sxid=malformed, switch=malformed),
    ]
    assert {f.entity for f in run_detector(nothing, message)} <= {"gpu:n0.2", "node:n0"}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("phase", range(6))
def test_errors_are_found_at_any_interval_and_phase_of_the_polls(phase: int) -> None:
    """Links are read once a minute, never in the frames in which a window of 30 s ends."""

    def polled(tick: int, shown: Values) -> None:
        shown["nvlink.crc_errors"][2] += 5.0 * max(0, tick - 60)
        if tick % 6 != phase:
            for column in shown.values():
                column[:] = np.nan

    found = run_detector(polled, ticks=400)
    assert [f.level for f in found if f.entity == LINKS[2]][-1:] == ["page"]


def test_errors_that_most_links_have_are_normal() -> None:
    def usual(tick: int, shown: Values) -> None:
        shown["nvlink.replay_errors"] += np.floor((tick + 7 * np.arange(len(LINKS))) / 30)  # 12 an hour

    assert [f for f in run_detector(usual, ticks=2000) if f.level == "page"] == []
