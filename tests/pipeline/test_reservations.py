"""Maintenance reservations of a real Slurm become maintenance windows, and end with them."""

from __future__ import annotations

import threading
import time

import pytest

from pipeline.commands.reservations import (
    Reservation,
    apply_reservations,
    read_reservations,
    watch_reservations,
)
from pipeline.incidents.silences import make_scope_matchers
from pipeline.model.errors import Unreachable
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
    assert apply_reservations(site.people, [first]) == 1
    assert apply_reservations(site.people, [first]) == 0
    page = site.report("gpu:n0.0")
    assert site.state(page) == "silenced"
    longer = Reservation(first.name, first.starts, first.ends + HOUR, ("n0",))
    assert apply_reservations(site.people, [longer]) == 1
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
    assert apply_reservations(site.people, []) == 1
    assert site.state(page) == "silenced"
    site.now += 16 * MINUTE
    site.step()
    assert site.state(page) == "open"


def test_windows_of_people_are_left_alone(site):
    site.people.add_silence("maintenance", make_scope_matchers(["node:n0"]), None, site.now + HOUR, "mine", "ann")
    assert apply_reservations(site.people, []) == 0


def test_an_error_of_scontrol_is_logged_once_and_tried_again(site, monkeypatch, caplog):
    stop, tries = threading.Event(), []

    def broken():
        tries.append(1)
        if len(tries) == 3:
            stop.set()
        raise Unreachable("scontrol: no slurmctld")

    monkeypatch.setattr("pipeline.commands.reservations.read_reservations", broken)
    watch_reservations(lambda: site.people, 0.0, stop)
    assert (len(tries), caplog.text.count("no slurmctld")) == (3, 1)


@pytest.mark.slurm
def test_a_real_slurm_names_its_maintenance_reservations_and_no_others(tmp_path, monkeypatch):
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", f"{cluster.folder}/slurm.conf")
        create = ("scontrol", "create", "reservation", "duration=60", "users=root")
        cluster.run(*create, "reservationname=pump", "starttime=now", "flags=maint,ignore_jobs", "nodes=gpu001,gpu002")
        cluster.run(*create, "reservationname=course", "starttime=now+3hours", "nodes=gpu001")
        (found,) = read_reservations()
        assert (found.name, found.nodes) == ("pump", ("gpu001", "gpu002"))
        assert abs(found.starts - time.time() * SECOND) < 120 * SECOND
        assert found.ends - found.starts == HOUR
