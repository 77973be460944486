"""Maintenance reservations of a real Slurm become maintenance windows, and end with them."""

from __future__ import annotations

import threading
import time

import pytest

from pipeline.api.people_routes import Reservations
from pipeline.commands.doctor_slurm import check_reservations
from pipeline.commands.reservations import (
    Reservation,
    ReservationWatch,
    apply_reservations,
    read_reservations,
    split_names,
)
from pipeline.config.sections import Config, Incidents
from pipeline.incidents.audit import list_audit
from pipeline.incidents.handover import format_handover, read_handover
from pipeline.incidents.silences import make_scope_matchers
from pipeline.model.errors import Retryable, Unreachable, UsageError
from pipeline.model.records import SECOND
from tests.pipeline.living import HOUR, MINUTE, LivingSite
from tests.slurm_cluster import Cluster, missing


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


def reservation(site, name="pump", nodes=("n0", "n1"), hours=1):
    return Reservation(name, site.now, site.now + hours * HOUR, nodes)


def windows(site):
    return {s.reason: (s.state(site.now), str(s.matchers[0])) for s in site.people.list_silences("maintenance")}


@pytest.mark.slow
def test_a_reservation_is_a_window_once_and_follows_its_changes(site):
    first = reservation(site)
    assert apply_reservations(site.people, [first]) == (1, {})
    assert apply_reservations(site.people, [first]) == (0, {})
    page = site.report("gpu:n0.0")
    assert site.state(page) == "silenced"
    longer = Reservation(first.name, first.starts, first.ends + HOUR, ("n0",))
    assert apply_reservations(site.people, [longer]) == (1, {})
    assert windows(site) == {"Slurm reservation pump": ("active", 'scope="node:n0"')}
    site.wait(110)
    assert site.state(page) == "silenced"
    site.wait(26)
    assert site.state(page) == "open"


def test_a_reservation_that_is_deleted_early_ends_its_window_with_its_grace(site):
    apply_reservations(site.people, [reservation(site)])
    page = site.report("gpu:n0.0")
    site.wait(5)
    site.restart()
    assert apply_reservations(site.people, []) == (1, {})
    assert site.state(page) == "silenced"
    site.now += 16 * MINUTE
    site.step()
    assert site.state(page) == "open"


def test_a_reservation_that_comes_back_is_a_window_again_with_what_changed_of_it(site):
    first = Reservation("pump", site.now + HOUR, site.now + 3 * HOUR, ("n0",))
    apply_reservations(site.people, [first])
    site.wait(2)
    assert apply_reservations(site.people, []) == (1, {})
    site.wait(2)
    second = Reservation("pump", first.starts, first.ends, ("n0", "n1"))
    assert apply_reservations(site.people, [second]) == (1, {})
    assert apply_reservations(site.people, [second]) == (0, {})
    site.restart()
    site.wait(60)
    assert site.state(site.report("gpu:n1.0")) == "silenced"
    (window,) = site.people.list_silences("maintenance")
    assert (window.expired, window.expired_by, window.state(site.now)) == (None, None, "active")


@pytest.mark.parametrize("late", [2, 40])
def test_a_reservation_that_is_extended_just_before_its_end_keeps_its_window(site, late):
    """The reading after the extension comes after the former end: within the grace of the window, or later."""
    first = reservation(site)
    apply_reservations(site.people, [first])
    page = site.report("gpu:n0.0")
    site.wait(60 + late)
    longer = Reservation("pump", first.starts, first.ends + 2 * HOUR, first.nodes)
    assert apply_reservations(site.people, [longer]) == (1, {})
    assert apply_reservations(site.people, [longer]) == (0, {})
    assert site.state(page) == "silenced"
    assert bool(site.alerts()) == (late > 15)
    site.wait(60)
    assert site.state(site.report("gpu:n1.0")) == "silenced"


def test_a_window_that_a_person_ended_stays_ended_when_its_reservation_comes_back(site):
    apply_reservations(site.people, [reservation(site)])
    (window,) = site.people.list_silences("maintenance")
    site.wait(1)
    site.people.expire_silence(window.id, "ann")
    first = Reservation("pump", window.starts, window.ends, ("n0", "n1"))
    assert apply_reservations(site.people, []) == (0, {})
    assert apply_reservations(site.people, [first]) == (0, {})
    assert site.people.list_silences("maintenance")[0].expired_by == "ann"


@pytest.mark.parametrize(
    ("printed", "wrong"),
    [
        ("", "printed nothing"),
        ("\n", "printed nothing"),
        ("slurm_load_reservations error\n", "printed 'slurm_load_reservations error'"),
        ("ReservationName=a StartTime=1 EndTime=9 Nodes=n0 Flags=MAINT\nState=ACTIVE\n", "printed 'State=ACTIVE'"),
    ],
)
def test_an_answer_without_reservations_that_does_not_say_so_ends_no_window(site, monkeypatch, printed, wrong):
    apply_reservations(site.people, [reservation(site)])
    monkeypatch.setattr(
        "pipeline.commands.reservations.read_reservations", lambda: read_reservations(lambda _: printed)
    )
    with pytest.raises(Unreachable, match=wrong):
        ReservationWatch(120.0).apply(site.people)
    assert site.people.list_silences("maintenance")[0].expired is None


def test_an_answer_that_says_that_there_is_no_reservation_ends_the_windows(site, monkeypatch):
    apply_reservations(site.people, [reservation(site)])
    answer = "No reservations in the system\n"
    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", lambda: read_reservations(lambda _: answer))
    ReservationWatch(120.0).apply(site.people)
    assert site.people.list_silences("maintenance")[0].expired == site.now


def test_a_line_that_is_cut_is_a_failure_and_its_window_stays(site):
    apply_reservations(site.people, [reservation(site)])
    start = f"StartTime={site.now // SECOND} EndTime={site.now // SECOND + 3600}"
    for line, lacks in (
        (f"ReservationName=pump {start}", "Nodes"),
        (f"ReservationName=pump {start} Nodes=n0", "Flags"),
    ):
        found, failed = read_reservations(lambda _, line=line: line)
        assert (found, failed) == ([], {"pump": f"scontrol shows no {lacks} of it"})
        assert apply_reservations(site.people, found, failed) == (0, failed)


def test_times_and_nodes_of_a_window_that_follows_a_reservation_are_changed_by_the_reservation_alone(site):
    first = reservation(site)
    apply_reservations(site.people, [first])
    (window,) = site.people.list_silences("maintenance")
    wrong = (
        f"^maintenance {window.id}: follows Slurm's reservation pump, .*scontrol update ReservationName=pump EndTime="
    )
    for change in (
        {"ends": window.ends + HOUR},
        {"starts": window.starts - HOUR},
        {"matchers": make_scope_matchers(["node:n7"])},
    ):
        with pytest.raises(UsageError, match=wrong):
            site.people.edit_silence(window.id, "ann", **change)
    assert site.people.list_silences("maintenance") == [window]
    same = {"ends": window.ends, "starts": window.starts, "matchers": window.matchers}
    site.people.edit_silence(window.id, "ann", **same, reason="pump is changed, ask Bo")
    assert apply_reservations(site.people, [first]) == (0, {})
    (window,) = site.people.list_silences("maintenance")
    assert window.reason == "pump is changed, ask Bo"


def test_a_window_that_a_person_ended_does_not_count_as_applied(site, monkeypatch):
    read = [reservation(site), reservation(site, "fab", ("n5",))]
    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", lambda: (read, {}))
    watch = ReservationWatch(120.0)
    watch.apply(site.people)
    assert watch.applied == 2
    site.wait(1)
    site.people.expire_silence(read[0].id, "ann")
    watch.apply(site.people)
    assert (watch.applied, watch.failures) == (1, {})


def test_a_window_that_a_person_changes_while_it_ends_stops_no_other(site, monkeypatch):
    gone, other = reservation(site, "gone"), reservation(site, "other", ("n5",))
    apply_reservations(site.people, [gone])
    (window,) = site.people.list_silences("maintenance")
    site.wait(1)
    site.people.edit_silence(window.id, "ann", reason="ask Bo")
    monkeypatch.setattr(site.people, "list_silences", one_old_list(site.people, window))
    changed, failed = apply_reservations(site.people, [other])
    assert (changed, list(failed)) == (1, ["gone"])
    assert apply_reservations(site.people, [other]) == (1, {})


def test_a_person_who_ends_a_window_while_its_reservation_is_applied_wins(site, monkeypatch):
    first = reservation(site)
    apply_reservations(site.people, [first])
    (window,) = site.people.list_silences("maintenance")
    longer = Reservation("pump", first.starts, first.ends + HOUR, first.nodes)
    site.wait(1)
    site.people.expire_silence(window.id, "ann")
    monkeypatch.setattr(site.people, "list_silences", one_old_list(site.people, window))
    assert apply_reservations(site.people, [longer])[0] == 0
    assert site.people.list_silences("maintenance")[0].expired_by == "ann"


def one_old_list(people, window):
    """What lists silences, the first time as before the person's act."""
    true, old = people.list_silences, [[window]]
    return lambda *kind: old.pop() if old else true(*kind)


def test_windows_of_people_are_left_alone(site):
    site.people.add_silence("maintenance", make_scope_matchers(["node:n0"]), None, site.now + HOUR, "mine", "ann")
    assert apply_reservations(site.people, []) == (0, {})


def test_an_error_of_scontrol_is_logged_once_and_tried_again(site, monkeypatch, caplog):
    stop, tries = threading.Event(), []

    def broken():
        tries.append(1)
        if len(tries) == 3:
            stop.set()
        raise Unreachable("scontrol: no slurmctld")

    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", broken)
    watch = ReservationWatch(0.001)
    watch.run(lambda: site.people, stop)
    assert (len(tries), caplog.text.count("no slurmctld")) == (3, 1)
    assert watch.as_json()["failures"] == [{"reservation": "", "reason": "scontrol: no slurmctld"}]


def test_a_pipeline_that_starts_is_no_failure_of_reservations():
    stop, tries = threading.Event(), []

    def find_people():
        tries.append(1)
        if len(tries) == 3:
            stop.set()
        raise Retryable("the pipeline is starting")

    watch = ReservationWatch(0.001)
    watch.run(find_people, stop)
    assert (len(tries), watch.as_json()["failures"]) == (3, [])


def nodes_of(number):
    return tuple(f"gpu-a{i // 100:03d}-n{i % 100:02d}" for i in range(number))


def test_a_reservation_of_a_whole_system_is_a_window_with_a_short_text_and_survives_a_restart(site):
    every = nodes_of(12_500)
    full = reservation(site, "full", (*every, "n0"))
    assert apply_reservations(site.people, [full]) == (1, {})
    page, other = site.report("gpu:n0.0"), site.report("gpu:n1.0")
    assert (site.state(page), site.state(other)) == ("silenced", "open")
    site.restart()
    assert apply_reservations(site.people, [reservation(site, "full", ("n0", *reversed(every)))]) == (0, {})
    site.step()
    assert (site.state(page), site.state(other)) == ("silenced", "open")
    (window,) = site.people.list_silences("maintenance")
    assert window.as_json(site.now)["text"].endswith('|… (12,501 values)"')
    assert len(window.as_json(site.now)["text"]) < 160
    (row,) = [row for row in list_audit(site.database.connection) if row["target"] == window.id]
    assert len(str(row)) < 2000
    assert max(map(len, format_handover(call_handover(site)).splitlines())) <= 120
    assert len(format_handover(call_handover(site)).splitlines()) < 25


def call_handover(site):
    return read_handover(site.database.connection, site.now - HOUR, site.now)


def test_a_reservation_that_cannot_be_applied_stops_no_other_and_no_end(site):
    apply_reservations(site.people, [reservation(site, "old", ("n1",))])
    wrong = Reservation("wrong", site.now, site.now + HOUR, ())
    changed, failed = apply_reservations(site.people, [wrong, reservation(site, "zeta", ("n0",))])
    assert (changed, failed) == (2, {"wrong": "scontrol names no node of it"})
    assert site.state(site.report("gpu:n0.0")) == "silenced"
    (old,) = [s for s in site.people.list_silences("maintenance") if s.reason.endswith("old")]
    assert old.expired == site.now


def test_a_reservation_that_cannot_be_read_keeps_its_window_and_others_are_read(site):
    lines = [
        f"ReservationName={name} StartTime={start} EndTime={site.now // SECOND + 3600} Nodes={nodes} Flags=MAINT,SPEC"
        for name, start, nodes in (("bad", 1, "broken"), ("worse", "Unknown", "n2"), ("good", 1, "n[0-1],n7"))
    ]
    apply_reservations(site.people, [reservation(site, "bad", ("n5",))])

    def scontrol(words):
        if words[-1] == "reservation":
            return "\n".join(lines)
        if words[-1] == "broken":
            raise Unreachable("scontrol: Invalid hostlist")
        return "n0\nn1\nn7\n"

    found, failed = read_reservations(scontrol)
    assert [(r.name, r.nodes) for r in found] == [("good", ("n0", "n1", "n7"))]
    assert failed == {"bad": "scontrol: Invalid hostlist", "worse": "invalid literal for int() with base 10: 'Unknown'"}
    assert apply_reservations(site.people, found, failed) == (1, failed)
    assert [s.expired for s in site.people.list_silences("maintenance")] == [None, None]


def test_names_of_nodes_are_given_to_scontrol_in_parts_that_fit_an_argument():
    text = ",".join([f"a{i}-[1,3-5]" for i in range(50)])
    parts = list(split_names(text, 100))
    assert ",".join(parts) == text
    assert max(map(len, parts)) <= 100
    assert list(split_names("n[1,2,3]", 4)) == ["n[1,2,3]"]


def test_a_reservation_of_a_year_is_extended_when_half_of_its_window_is_left_and_ends_with_it(site):
    year = reservation(site, "year", ("n0",), hours=365 * 24)
    edits, start = 0, site.now
    for _ in range(365 * 4):
        edits += apply_reservations(site.people, [year])[0]
        (window,) = site.people.list_silences("maintenance")
        assert window.ends > min(site.now + 14 * 24 * HOUR, year.ends - 1)
        site.now += 6 * HOUR
    assert (edits, window.ends) == (23, start + 365 * 24 * HOUR)


def test_a_reservation_that_is_cut_short_ends_earlier(site):
    year = reservation(site, "year", ("n0",), hours=365 * 24)
    apply_reservations(site.people, [year])
    short = Reservation("year", year.starts, year.starts + HOUR, ("n0",))
    assert apply_reservations(site.people, [short]) == (1, {})
    assert site.people.list_silences("maintenance")[0].ends == short.ends


def test_failed_reservations_are_in_the_metrics_the_api_and_the_doctor(site, monkeypatch):
    read = [reservation(site, "good", ("n0",)), Reservation("empty", site.now, site.now + HOUR, ())]
    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", lambda: (read, {"odd": "no node"}))
    watch = ReservationWatch(120.0)
    watch.apply(site.people)
    name = "fleetpulse_maintenance_reservations"
    assert watch.count() == {f'{name}{{state="applied"}}': 1.0, f'{name}{{state="failed"}}': 2.0}
    assert ReservationWatch().count() == {}
    answer = Reservations.model_validate(watch.as_json()).model_dump()
    monkeypatch.setattr("pipeline.http.client.get", lambda config, path: (200, answer))
    config = Config(incidents=Incidents(slurm_seconds=120.0))
    found = check_reservations(config)
    assert (found.state, found.found) == ("fail", "empty: scontrol names no node of it; odd: no node")
    answer["failures"] = []
    assert check_reservations(config).found.startswith("1 of Slurm are maintenance windows, read at 2026-")
    assert check_reservations(Config()).state == "info"


def test_nodes_that_nothing_knows_are_a_warning_of_the_api_and_the_doctor(site, monkeypatch):
    read = [
        reservation(site, "good", ("n0", "n1")),
        reservation(site, "far", ("nosuch7.example.com", "n1")),
        reservation(site, "lost", tuple(f"x{n}" for n in range(1200))),
    ]
    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", lambda: (read, {}))
    watch = ReservationWatch(120.0)
    watch.apply(site.people)
    answer = Reservations.model_validate(watch.as_json()).model_dump()
    assert (answer["applied"], answer["failures"]) == (3, [])
    assert answer["warnings"] == [
        {"reservation": "far", "reason": "1 of its 2 nodes are not known: node:nosuch7.example.com"},
        {"reservation": "lost", "reason": "1,200 of its 1,200 nodes are not known: node:x0, node:x1, node:x2, ..."},
    ]
    monkeypatch.setattr("pipeline.http.client.get", lambda config, path: (200, answer))
    found = check_reservations(Config(incidents=Incidents(slurm_seconds=120.0)))
    assert found.state == "warn"
    assert found.found.startswith("3 of Slurm are maintenance windows, read at 2026-")
    assert "; far: 1 of its 2 nodes are not known: node:nosuch7.example.com; lost: " in found.found
    del read[1:]
    watch.apply(site.people)
    assert watch.as_json()["warnings"] == []


@pytest.mark.slurm
def test_a_real_slurm_names_its_maintenance_reservations_and_no_others(tmp_path, monkeypatch):
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", f"{cluster.folder}/slurm.conf")
        assert read_reservations() == ([], {})
        create = ("scontrol", "create", "reservation", "duration=60", "users=root")
        cluster.run(*create, "reservationname=pump", "starttime=now", "flags=maint,ignore_jobs", "nodes=gpu001,gpu002")
        cluster.run(*create, "reservationname=course", "starttime=now+3hours", "nodes=gpu001")
        ((found,), failed) = read_reservations()
        assert (found.name, found.nodes, failed) == ("pump", ("gpu001", "gpu002"), {})
        assert abs(found.starts - time.time() * SECOND) < 120 * SECOND
        assert found.ends - found.starts == HOUR
