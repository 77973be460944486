"""Incidents that a person split: what stays gets its own cause, and the split-off part keeps its findings."""

from __future__ import annotations

import pytest

from pipeline.model.records import Caller
from tests.pipeline.living import SECOND, LivingSite

ANN = Caller("ann", "operator", "10.0.0.7")


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


def merge_two(site: LivingSite) -> str:
    """Two GPUs of two nodes that a person merged; the first is the cause."""
    one, two = site.report("gpu:n5.0"), site.report("gpu:n4.3")
    site.people.merge(one, [two], ANN, "one fault")
    assert site.shown()[one].cause == "gpu:n5.0"
    return one


@pytest.mark.slow
def test_what_stays_gets_its_own_cause_when_the_cause_is_split_off(site):
    one = merge_two(site)
    made = site.people.split(one, ["gpu:n5.0"], ANN, "two faults")
    assert (made.cause, made.entity, made.members) == ("gpu:n5.0", "gpu:n5.0", ("gpu:n5.0",))
    left = site.stored(one)
    assert (left.cause, left.entity, left.members) == ("gpu:n4.3", "gpu:n4.3", ("gpu:n4.3",))
    assert left.summary == "gpu:n4.3: hot"
    assert site.comments(one)[-1] == f"{made.id}: two faults; cause: gpu:n4.3"
    sent = [alert["labels"] for body in site.bodies() for alert in body["alerts"] if alert["status"] == "firing"]
    assert [(i["cause"], i["entity"]) for i in sent if i["incident"] == one][-1] == ("gpu:n4.3", "gpu:n4.3")
    assert site.engine.impact.tracked[one].reach.nodes == {"node:n4"}


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["hot", "xid"])
def test_later_findings_on_the_split_off_device_join_the_split_off_incident(site, detector):
    one = merge_two(site)
    made = site.people.split(one, ["gpu:n5.0"], ANN, "two faults")
    site.wait(1)
    site.restart()
    site.report("gpu:n5.0", detector=detector, onset=site.now)
    assert site.stored(one).members == ("gpu:n4.3",)
    assert site.incident_of("gpu:n5.0") == made.id
    homes = site.database.connection.execute("SELECT DISTINCT entity, incident FROM findings").fetchall()
    assert sorted(homes) == [("gpu:n4.3", one), ("gpu:n5.0", made.id)]


@pytest.mark.slow
def test_the_cause_stays_while_a_finding_that_stays_names_it(site):
    one = merge_two(site)
    made = site.people.split(one, ["gpu:n4.3"], ANN, "two faults")
    assert (made.cause, site.stored(one).cause) == ("gpu:n4.3", "gpu:n5.0")
    assert site.comments(one)[-1] == f"{made.id}: two faults"


@pytest.mark.slow
def test_the_worst_finding_that_stays_is_the_cause_and_the_others_stay_with_it(site):
    one, two = site.report("gpu:n5.0"), site.report("gpu:n4.3", level="ticket")
    three = site.report("gpu:n6.1")
    site.people.merge(one, [two, three], ANN, "one fault")
    made = site.people.split(one, ["gpu:n5.0"], ANN, "two faults")
    left = site.stored(one)
    assert made.confidence is not None
    assert (left.cause, left.members) == ("gpu:n6.1", ("gpu:n4.3", "gpu:n6.1"))
    site.wait(40)
    assert site.report("gpu:n4.3", onset=site.now) == one


@pytest.mark.slow
def test_a_split_off_incident_that_ended_is_reopened_by_its_findings_and_not_merged_back(site):
    one = site.report("node:n0")
    site.report("gpu:n0.1")
    assert set(site.shown()[one].members) == {"node:n0", "gpu:n0.1"}
    made = site.people.split(one, ["gpu:n0.1"], ANN, "another fault")
    site.clear("gpu:n0.1")
    site.wait(12)
    assert site.state(made.id) == "resolved"
    assert site.report("gpu:n0.1", onset=site.now) == made.id
    assert site.stored(one).members == ("node:n0",)


@pytest.mark.slow
def test_a_rank_that_was_split_from_its_gpu_has_its_findings_also_after_its_end(site):
    one = site.report("gpu:n0.0")
    site.report("rank:1.0", detector="straggler")
    assert set(site.shown()[one].members) == {"gpu:n0.0", "rank:1.0"}
    made = site.people.split(one, ["rank:1.0"], ANN, "the data loader")
    site.report("rank:1.0", detector="straggler_stall", onset=site.now)
    assert site.stored(one).members == ("gpu:n0.0",)
    assert site.kinds(one)[-1] == "split"
    site.clear("rank:1.0")
    site.wait(12)
    assert site.state(made.id) == "resolved"
    assert site.report("rank:1.0", detector="straggler", onset=site.now) == made.id
    assert site.stored(one).members == ("gpu:n0.0",)


@pytest.mark.slow
def test_a_shared_cause_stays_while_it_explains_several_of_those_that_stay(site):
    hot = [f"gpu:n{n}.{g}" for n in range(4) for g in range(4)]
    one = site.report(*hot, detector="thermal_throttle")
    assert site.shown()[one].cause == "rack:r0"
    made = site.people.split(one, hot[:1], ANN, "a bad fan")
    assert (made.cause, site.stored(one).cause) == (hot[0], "rack:r0")
    site.people.split(one, hot[1:-1], ANN, "all the others")
    assert site.stored(one).cause == hot[-1]


@pytest.mark.slow
def test_a_shared_cause_that_is_found_later_does_not_merge_back_what_was_split_off(site):
    one = site.report("node:n0")
    site.wait(40)
    two = site.report("gpu:n0.0")
    site.people.merge(one, [two], ANN, "one fault")
    made = site.people.split(one, ["gpu:n0.0"], ANN, "two faults")
    site.now += 10 * SECOND
    later = [f"gpu:n0.{g}" for g in range(1, 4)]
    site.report(*later)
    assert set(site.stored(one).members) == {"node:n0", *later}
    assert (site.state(made.id), site.stored(made.id).members) == ("open", ("gpu:n0.0",))


@pytest.mark.slow
def test_what_was_split_off_in_parts_may_get_the_shared_cause_without_the_incident_that_it_left(site):
    one, parts = site.report("node:n0"), [f"gpu:n0.{g}" for g in range(4)]
    site.wait(40)
    for part in parts:
        if (found := site.report(part)) != one:
            site.people.merge(one, [found], ANN, "one fault")
        site.people.split(one, [part], ANN, "its own fault")
    site.now += 10 * SECOND
    site.report(parts[0], detector="xid")
    site.wait(2)
    assert site.stored(one).members == ("node:n0",)
    rest = [i for i in site.shown().values() if i.resolved is None and i.id != one]
    assert sorted(member for i in rest for member in i.members) == parts


@pytest.mark.slow
def test_what_stays_and_what_was_split_off_have_severity_onset_and_title_of_their_own_findings(site):
    began = site.now
    one = site.report("gpu:n5.0")
    site.now += 600 * SECOND
    two = site.report("gpu:n4.3", level="ticket")
    site.people.merge(one, [two], ANN, "one fault")
    shown = site.stored(one)
    assert (shown.severity, shown.onset, shown.summary) == ("page", began, "gpu:n5.0: hot")
    made = site.people.split(one, ["gpu:n5.0"], ANN, "two faults")
    left = site.stored(one)
    assert (left.severity, left.onset, left.summary) == ("ticket", began + 600 * SECOND, "gpu:n4.3: hot")
    assert (made.severity, made.onset, made.summary) == ("page", began, "gpu:n5.0: hot")
    assert site.comments(one)[-1] == f"{made.id}: two faults; cause: gpu:n4.3; severity: ticket"
    assert left.life.waits_since is None  # a ticket pages no person
    severities = [
        (alert["status"], alert["labels"]["severity"])
        for body in site.bodies()
        for alert in body["alerts"]
        if alert["labels"]["incident"] == one
    ]
    assert severities[-2:] == [("resolved", "critical"), ("firing", "warning")]
    site.restart()
    site.wait(2)
    assert (site.stored(one).severity, site.stored(one).onset) == ("ticket", began + 600 * SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("through_the_store", [False, True])
def test_a_condition_that_returned_keeps_its_first_onset_in_a_split(site, through_the_store):
    one = site.report("node:n0")
    began = site.now + 60 * SECOND
    site.now = began
    site.report("gpu:n0.1", level="ticket")
    site.now += 300 * SECOND
    site.report("gpu:n0.1", level="ticket", onset=site.now)
    if through_the_store:
        site.active = {}
        site.wait(130)
        site.restart()
        site.people.reopen(one, ANN, "not over")
    made = site.people.split(one, ["gpu:n0.1"], ANN, "another fault")
    assert (made.onset, made.severity) == (began, "ticket")
    assert (site.stored(one).onset, site.stored(one).severity) == (began - 60 * SECOND, "page")


def hot_rack() -> list[str]:
    """GPUs of all nodes of a rack but two, of which a person has an incident."""
    gpus = [f"gpu:n{n}.{g}" for n in range(4) for g in range(4)]
    return [gpu for gpu in gpus if gpu not in ("gpu:n0.0", "gpu:n1.3")]


def merge_two_of_a_rack(site: LivingSite) -> str:
    one = site.report("gpu:n0.0", detector="thermal_throttle")
    two = site.report("gpu:n1.3", detector="thermal_throttle")
    site.people.merge(one, [two], ANN, "one fault")
    return one


def open_causes(site: LivingSite) -> dict[str, int]:
    """Causes of the open incidents, with how many members each has."""
    return {i.cause: len(i.members) for i in site.shown().values() if i.resolved is None}


@pytest.mark.slow
def test_an_incident_that_was_split_and_merged_back_is_part_of_a_shared_cause_again(site):
    one = merge_two_of_a_rack(site)
    made = site.people.split(one, ["gpu:n1.3"], ANN, "two faults")
    site.people.merge(one, [made.id], ANN, "no, one")
    site.now += 10 * SECOND
    site.report(*hot_rack(), detector="thermal_throttle")
    assert open_causes(site) == {"rack:r0": 16}


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_what_a_person_split_off_stays_out_of_a_shared_cause_that_takes_in_all_others(site, again):
    one = merge_two_of_a_rack(site)
    site.people.split(one, ["gpu:n1.3"], ANN, "two faults")
    if again:
        site.restart()
    site.now += 10 * SECOND
    site.report(*hot_rack(), detector="thermal_throttle")
    assert open_causes(site) == {"rack:r0": 15, "gpu:n1.3": 1}
    assert site.stored(one).cause == "rack:r0"


@pytest.mark.slow
def test_what_a_person_split_off_and_merged_with_another_one_is_part_of_shared_causes_again(site):
    one = merge_two_of_a_rack(site)
    made = site.people.split(one, ["gpu:n1.3"], ANN, "two faults")
    third = site.report("gpu:n2.0", detector="thermal_throttle")
    site.people.merge(made.id, [third], ANN, "these are one")
    site.now += 10 * SECOND
    site.report(*(g for g in hot_rack() if g != "gpu:n2.0"), detector="thermal_throttle")
    found = open_causes(site)
    assert "rack:r0" in found
    assert sum(found.values()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_only_the_part_that_a_person_reopened_waits_for_a_person_after_a_merge_and_a_split(site, again):
    reopened = site.report("gpu:n4.3")
    site.people.resolve(reopened, ANN, "swapped")
    site.people.reopen(reopened, ANN, "not yet")
    never = site.report("gpu:n5.0")
    site.people.merge(never, [reopened], ANN, "one fault")
    if again:
        site.restart()
    made = site.people.split(never, ["gpu:n4.3"], ANN, "two faults")
    site.clear("gpu:n5.0", "gpu:n4.3")
    site.wait(60)
    assert (site.state(never), site.state(made.id)) == ("resolved", "open")
    site.people.resolve(made.id, ANN, "swapped")


@pytest.mark.slow
def test_a_reopened_incident_that_a_shared_cause_takes_in_still_waits_for_a_person(site):
    one = site.report("gpu:n0.0", detector="thermal_throttle")
    site.people.resolve(one, ANN, "cool")
    site.people.reopen(one, ANN, "hot")
    site.now += 10 * SECOND
    gpus = [f"gpu:n{n}.{g}" for n in range(4) for g in range(4)]
    site.report(*gpus[1:], detector="thermal_throttle")
    assert open_causes(site) == {"rack:r0": 16}
    site.clear(*gpus)
    site.wait(60)
    assert open_causes(site) == {"rack:r0": 16}


@pytest.mark.slow
def test_what_a_person_resolved_and_a_finding_reopened_resolves_by_itself(site):
    one, onset = site.report("gpu:n4.3"), site.now
    site.people.resolve(one, ANN, "swapped")
    site.people.reopen(one, ANN, "not yet")
    site.people.resolve(one, ANN, "now it is")
    site.clear("gpu:n4.3")
    site.wait(15)
    assert site.report("gpu:n4.3", onset=onset) == one
    site.clear("gpu:n4.3")
    site.wait(15)
    assert site.state(one) == "resolved"
