"""The collector redfish over real HTTP: its values, their delay, and requests that it never sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import NoData, Reading
from agents.collectors.bmc import redfish_events as listening
from agents.collectors.bmc import redfish_poller as watching
from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.node.batches import encode_column
from agents.node.workers.pool import WorkerPool
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE, kinds_of_class
from tests.agents.redfish_double import Double
from tests.agents.redfish_faults import Fault, redirect, refusal, wrong_types
from tests.agents.redfish_tree import ROOT, SSE_URI, Tree
from tests.agents.redfish_trees import CDU, FLOW, LEAK, cdu, chassis, pdu, shelf

COLLECT_SHARE = 10.0
SECONDARY, DETECTORS = f"{CDU}/SecondaryCoolantConnectors", f"{CDU}/LeakDetection/LeakDetectors"
DETECTOR = "leak_detector:b1.cdu.C1.Tray"


class CollectorReader:
    """Reads a collector as the agent does; keeps the newest value of each signal and all events."""

    def __init__(self, collector: Redfish) -> None:
        self.collector = collector
        self.values: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []
        self.slowest = 0.0

    def read(self) -> tuple[Reading, ...]:
        began = time.monotonic()
        found = self.collector.read()
        self.slowest = max(self.slowest, time.monotonic() - began)
        for reading in found:
            self.events += reading.events
            for name, column in reading.columns.items():
                for entity, value in zip(reading.entities, column.tolist(), strict=True):
                    if value == value and value != 2**64 - 1:
                        self.values[entity, name] = value
        return found

    def until(self, holds: Callable[[], bool], patience: float = COLLECT_SHARE) -> float:
        """Reads until a condition holds; returns the seconds that took."""
        began = time.monotonic()
        while time.monotonic() - began < patience:
            self.read()
            if holds():
                return time.monotonic() - began
            time.sleep(0.02)
        raise AssertionError(f"not within {patience} s; {self.values}, {self.events}")

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Waits for the threads of the collector or of the BMC, without a read."""
        end = time.monotonic() + COLLECT_SHARE
        while not holds():
            assert time.monotonic() < end, f"not within {COLLECT_SHARE} s"
            time.sleep(0.01)

    def has(self, entity: str, signal: str, value: float | None = None) -> Callable[[], bool]:
        def holds() -> bool:
            found = self.values.get((entity, signal))
            return found is not None and (value is None or abs(found - value) < 1e-6)

        return holds

    def events_of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


StartReader = Callable[..., CollectorReader]


@pytest.fixture
def start_reader(tmp_path: Path) -> Iterator[StartReader]:
    """Opens a collector that reads doubles, named b1, b2, ..."""
    opened: list[Redfish] = []

    def begin(*doubles: Double, **settings: object) -> CollectorReader:
        bmcs = []
        for number, double in enumerate(doubles, 1):
            password = tmp_path / f"password{number}"
            password.write_text(double.password + "\n")
            password.chmod(0o600)
            facts = {"user": double.user, "password_file": password, "allow_http": True, "parents": ("rack:r1",)}
            bmcs.append(BmcSettings(f"b{number}", double.url, **{**facts, **settings}))  # type: ignore[arg-type]
        collector = Redfish(bmcs=tuple(bmcs))
        collector.open("n1")
        opened.append(collector)
        return CollectorReader(collector)

    yield begin
    for collector in opened:
        collector.close()


@pytest.fixture
def double() -> Iterator[Double]:
    with Double(cdu()) as made:
        yield made


def test_a_coolant_unit_is_read_with_its_connectors_pumps_leaks_and_surroundings(
    double: Double, start_reader: StartReader
) -> None:
    reader = start_reader(double)
    reader.until(lambda: len(reader.values) >= 50)
    values = reader.values
    assert values["cdu:b1.C1", "coolant.flow"] == 324
    assert values["cdu:b1.C1", "coolant.pressure"] == pytest.approx(1.4)
    assert values["connector:b1.C1.primary.1", "coolant.supply_temperature"] == 24
    assert values["connector:b1.C1.secondary.1", "coolant.heat_removed"] == pytest.approx(214_570)
    assert values["pump:b1.C1.1", "pump.speed_ratio"] == pytest.approx(0.62)
    assert values["pump:b1.C1.1", "pump.speed"] == pytest.approx(3720)
    assert values["filter:b1.C1.1", "filter.service_time"] == 900
    assert values["cdu:b1.C1", "coolant.humidity"] == pytest.approx(0.41)
    assert values[DETECTOR, "leak.state"] == 0
    assert values["bmc:b1", "bmc.reachable"] == 1
    inventory = reader.collector.inventory()
    assert inventory["pump:b1.C1.1"].parents == ("cdu:b1.C1", "rack:r1")
    assert inventory["cdu:b1.C1"].attributes["model"] == "NW-300"
    assert all(entity not in device.parents for entity, device in inventory.items())
    assert {entity for entity, _ in values} <= inventory.keys()


def test_shelves_and_pdus_are_read_with_their_supplies_rails_circuits_and_outlets(start_reader: StartReader) -> None:
    with Double(shelf()) as power_shelf, Double(pdu()) as distribution:
        reader = start_reader(power_shelf, distribution)
        reader.until(
            lambda: (
                reader.has("battery:b1.Shelf1.1", "battery.charge")() and reader.has("outlet:b2.P1.2", "power.draw")()
            )
        )
        values = reader.values
        assert values["psu:b1.Shelf1.1", "psu.input_power"] == 2180
        assert values["output:b1.Shelf1.1.0", "power.voltage"] == pytest.approx(50.1)
        assert values["chassis:b1.Shelf1", "power.limit"] == 16_000
        assert values["battery:b1.Shelf1.1", "battery.charge"] == pytest.approx(0.99)
        assert values["pdu:b2.P1", "power.draw"] == 9120
        assert values["circuit:b2.P1.branch.A", "power.breaker"] == 0
        reader.collector.close()


@pytest.mark.slow
def test_every_reading_keeps_the_contract(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double)
    seen = set()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for reading in reader.read():
            seen.add(reading.device_class)
            assert all(entity.partition(":")[0] in kinds_of_class(reading.device_class) for entity in reading.entities)
            assert len(set(reading.entities)) == len(reading.entities)
            assert set(reading.columns) <= set(Redfish.signals)
            for name, values in reading.columns.items():
                assert CATALOGUE[name].device_class == reading.device_class
                known = encode_column(CATALOGUE[name], values)
                assert (known == known).any()
        time.sleep(0.1)
    assert seen == {"coolant", "leak", "power", "bmc"}


@pytest.mark.slow
def test_a_changed_flow_is_read_within_two_seconds_without_an_event(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double, events=False)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 324))
    double.set(FLOW, "/Reading", 90.0, event=False)
    assert reader.until(reader.has("cdu:b1.C1", "coolant.flow", 90)) < 2
    assert reader.values["connector:b1.C1.secondary.1", "coolant.flow"] == 90


@pytest.mark.slow
def test_a_leak_is_detected_by_polling_alone(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double, events=False, leaks=1.0)
    reader.until(reader.has(DETECTOR, "leak.state", 0))
    double.set(LEAK, "/DetectorState", "Critical", event=False)
    assert reader.until(reader.has(DETECTOR, "leak.state", 2)) < 3
    assert not double.requests_for("/redfish/v1/EventService/SSE")


def test_an_event_reports_a_leak_immediately_and_its_detector_is_read_first(
    double: Double, start_reader: StartReader
) -> None:
    reader = start_reader(double, leaks=600.0)
    reader.until(lambda: bool(double.streams.listeners) and reader.has(DETECTOR, "leak.state", 0)())
    asked = len(double.requests)
    double.set(LEAK, "/DetectorState", "Critical")
    assert reader.until(reader.has(DETECTOR, "leak.state", 2)) < 1
    reader.until(lambda: any(seen.path == DETECTORS for seen in list(double.requests)[asked:]))
    (event,) = reader.events_of_kind("redfish")
    assert event.entity == DETECTOR
    assert event.data["message_id"].endswith("LeakDetectedCritical")
    assert event.data["severity"] == "Critical"


@pytest.mark.slow
def test_a_stream_that_ends_is_reopened_after_its_last_event(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double, leaks=600.0)
    reader.until(lambda: bool(double.streams.listeners) and reader.has(DETECTOR, "leak.state", 0)())
    double.set(LEAK, "/DetectorState", "Warning")
    reader.until(reader.has(DETECTOR, "leak.state", 1))
    before = len(double.streams.listeners)
    double.streams.end_all()
    reader.until(lambda: not double.streams.listeners or len(double.streams.listeners) < before)
    double.set(LEAK, "/DetectorState", "Critical")
    reader.until(reader.has(DETECTOR, "leak.state", 2))
    assert len(reader.events_of_kind("redfish")) == 2


@pytest.mark.slow
def test_a_bmc_gets_one_request_at_a_time(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double, fast=0.2, leaks=0.2, sensors=0.2, slow=0.2, inventory=0.2)
    ended: list[tuple[float, float]] = []

    def answered() -> bool:
        ended[:] = sorted((seen.began, seen.ended) for seen in double.requests if "SSE" not in seen.path and seen.ended)
        return len(ended) > 50

    reader.until(answered)
    assert double.most_in_flight == 1
    assert all(second[0] >= first[1] - 1e-3 for first, second in pairwise(ended))


@pytest.mark.slow
def test_a_slow_bmc_delays_neither_a_read_nor_other_bmcs(double: Double, start_reader: StartReader) -> None:
    with Double(chassis()) as held:
        reader = start_reader(held, double)
        reader.until(
            lambda: reader.has("cdu:b2.C1", "coolant.flow")() and reader.has("connector:b1.Blade1.1", "coolant.flow")()
        )
        held.fault("*", hold=threading.Event())
        reader.until(lambda: held.in_flight == 1)
        for flow in (300.0, 200.0, 100.0):
            double.set(FLOW, "/Reading", flow, event=False)
            assert reader.until(reader.has("cdu:b2.C1", "coolant.flow", flow)) < 2
        assert held.most_in_flight == 1
        assert reader.slowest < 0.1
        began = time.monotonic()
        reader.collector.close()
        assert time.monotonic() - began < 3


@pytest.mark.slow
def test_an_expired_session_is_reopened_and_deleted_at_the_end(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))
    assert len(double.service.sessions) == 1
    double.service.sessions.clear()
    double.set(FLOW, "/Reading", 77.0, event=False)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 77))
    assert len(double.requests_for(f"{ROOT}/SessionService/Sessions", "POST")) == 2
    reader.collector.close()
    reader.wait_for(lambda: not double.service.sessions)
    assert reader.events_of_kind("bmc_lost") == []


@pytest.mark.slow
def test_a_close_aborts_the_request_before_the_logout_and_never_the_logout(
    double: Double, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))
    (poller,) = reader.collector._pollers
    abort, logout = poller.client.abort, poller.session.logout
    steps, logging_out = list[str](), threading.Event()

    def abort_late() -> None:
        logging_out.wait(0.5)  # long enough for a thread that does not wait for it
        steps.append("abort")
        abort()

    def begin_logout() -> None:
        steps.append("logout")
        logging_out.set()
        logout()

    monkeypatch.setattr(poller.client, "abort", abort_late)
    monkeypatch.setattr(poller.session, "logout", begin_logout)
    reader.collector.close()
    reader.wait_for(lambda: not double.service.sessions)
    assert steps == ["abort", "logout"]


def test_without_sessions_the_password_is_sent_with_each_request(double: Double, start_reader: StartReader) -> None:
    double.fault(f"{ROOT}/SessionService/Sessions", refusal(405))
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))
    assert any(seen.headers.get("authorization", "").startswith("Basic ") for seen in double.requests)


@pytest.mark.slow
def test_a_wrong_password_is_reported_and_retried_with_backoff(
    double: Double, start_reader: StartReader, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not-this")
    wrong.chmod(0o600)
    reader = start_reader(double, password_file=wrong)
    reader.until(lambda: bool(reader.events_of_kind("bmc_lost")))
    until = time.monotonic() + 1
    while time.monotonic() < until:
        reader.read()
        time.sleep(0.05)
    assert len(double.requests_for(f"{ROOT}/SessionService/Sessions", "POST")) == 1
    (event,) = reader.events_of_kind("bmc_lost")
    assert "401" in event.data["reason"]
    assert "not-this" not in str(event.data)
    assert reader.values["bmc:b1", "bmc.reachable"] == 0


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("sesame", 0o644, "readable by every user"), ("", 0o600, "is empty"), (None, 0, "No such file")],
)
def test_an_unusable_password_file_is_reported(
    double: Double, start_reader: StartReader, tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "its-password"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    reader = start_reader(double, password_file=path)
    reader.until(lambda: bool(reader.events_of_kind("bmc_lost")))
    (event,) = reader.events_of_kind("bmc_lost")
    assert message in event.data["reason"]
    assert "sesame" not in event.data["reason"]
    assert reader.values["bmc:b1", "bmc.reachable"] == 0


@pytest.mark.slow
def test_a_bmc_that_disappears_and_returns_is_reported_once_each(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))
    double.fault("*", drop=0.0)
    reader.until(lambda: bool(reader.events_of_kind("bmc_lost")))
    double.clear_fault()
    reader.until(lambda: bool(reader.events_of_kind("bmc_back")), 15)
    assert [event.kind for event in reader.events if event.kind.startswith("bmc_")] == ["bmc_lost", "bmc_back"]
    assert reader.values["bmc:b1", "bmc.reachable"] == 1


def test_unchanged_values_are_not_sent_again(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double)
    reader.until(lambda: bool(double.streams.listeners) and reader.has("filter:b1.C1.1", "filter.service_time")())
    (bmc,) = reader.collector._pollers
    target = bmc.tree.targets[f"{ROOT}/ThermalEquipment"]
    assert target.etag
    asked = len(double.requests_for(target.path))
    double.streams.emit({"MessageId": "ResourceEvent.1.3.ResourceChanged", "OriginOfCondition": target.path})
    reader.until(
        lambda: len(double.requests_for(target.path)) > asked and double.requests_for(target.path)[-1].status != 0
    )
    assert double.requests_for(target.path)[-1].status == 304
    assert target.children
    assert bmc.failures == 0
    assert reader.events_of_kind("redfish") == []  # that a resource changed is shown by reading it


def unexpanded(document: Any) -> Any:
    """A collection with links as members, also if $expand was requested."""
    return {**document, "Members": [{"@odata.id": member["@odata.id"]} for member in document["Members"]]}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(mangle=unexpanded), Fault(status=501, times=1)], ids=["links", "refused"])
def test_an_unfulfilled_expand_feature_costs_nothing(double: Double, start_reader: StartReader, fault: Fault) -> None:
    double.fault(SECONDARY, fault)
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 324))
    double.set(FLOW, "/Reading", 66.0, event=False)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 66))
    (bmc,) = reader.collector._pollers
    assert not bmc.tree.targets[SECONDARY].expand
    assert bmc.tree.targets[f"{CDU}/PrimaryCoolantConnectors"].covers_members
    assert reader.events_of_kind("bmc_lost") == []


@pytest.mark.slow
def test_new_and_removed_members_are_noticed(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))
    one = double.tree.get(f"{SECONDARY}/1")
    assert one is not None
    path = double.tree.add(SECONDARY, "2", {**one, "@odata.id": f"{SECONDARY}/2", "Id": "2"})
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 648))
    assert reader.collector.inventory_changed()
    double.tree.drop(path)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 324))
    assert "connector:b1.C1.secondary.2" not in reader.collector.inventory()


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "fault",
    [
        {"mangle": wrong_types},
        {"body": b"[" * 100_000},
        {"body": b"\xff\xfe\x00nonsense"},
        {"body": b"[]"},
        {"truncate": 0.5},
        {"drop": 0.5},
        {"status": 500, "body": b"oops"},
        {"status": 404, "body": b"{}"},
        {"pad": 9 << 20},
    ],
    ids=["wrong types", "deep", "binary", "a list", "truncated", "cut", "500", "404", "9 MiB"],
)
def test_a_broken_response_of_one_resource_costs_no_other_value(
    double: Double, start_reader: StartReader, fault: dict[str, object]
) -> None:
    for path in (DETECTORS, f"{DETECTORS}/Tray", f"{CDU}/Pumps"):
        double.fault(path, **fault)  # type: ignore[arg-type]
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"), 20)
    (bmc,) = reader.collector._pollers
    reader.until(lambda: bmc.failures > 0, 20)
    double.set(FLOW, "/Reading", 55.0, event=False)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow", 55), 20)
    assert ("pump:b1.C1.1", "pump.speed_ratio") not in reader.values
    assert ROOT in reader.collector.inventory()["bmc:b1"].attributes["failure"]


def test_a_redirect_to_another_host_is_refused_and_gets_no_token(double: Double, start_reader: StartReader) -> None:
    with Double(pdu()) as stranger:
        double.fault(f"{ROOT}/ThermalEquipment", redirect(f"{stranger.url}{ROOT}"))
        reader = start_reader(double)
        (bmc,) = reader.collector._pollers
        reader.until(lambda: bmc.failures > 0)
        assert not stranger.requests


def test_a_redirect_within_the_bmc_is_followed(double: Double, start_reader: StartReader) -> None:
    once = redirect(f"{ROOT}/ThermalEquipment/", 308)
    once.times = 1
    double.fault(f"{ROOT}/ThermalEquipment", once)
    reader = start_reader(double)
    reader.until(reader.has("cdu:b1.C1", "coolant.flow"))


def test_only_configured_subjects_are_requested(double: Double, start_reader: StartReader) -> None:
    reader = start_reader(double, read=("leaks",))
    reader.until(reader.has(DETECTOR, "leak.state"))
    assert not [seen for seen in double.requests if "Connectors" in seen.path or "Pumps" in seen.path]


def test_without_bmcs_there_is_nothing_to_do() -> None:
    assert not Redfish().has_work()
    with pytest.raises(NoData, match="no BMC is configured"):
        Redfish().open("n1")
    with pytest.raises(NoData):
        Redfish().read()


def test_a_counter_that_no_entity_reported_is_missing() -> None:
    tree = Tree.from_capture(shelf().documents)
    with Double(tree) as power_shelf:
        collector = Redfish(bmcs=(BmcSettings("b1", power_shelf.url, allow_http=True),))
        power_shelf.service.login = False
        collector.open("n1")
        reader = CollectorReader(collector)
        reader.until(reader.has("chassis:b1.Shelf1", "power.energy"))
        assert reader.values["chassis:b1.Shelf1", "power.energy"] % 1 == 0
        collector.close()
    assert np.iinfo(np.uint64).max == 2**64 - 1


@pytest.mark.slow
def test_reads_with_different_entities_do_not_repeat_the_inventory(double: Double) -> None:
    double.service.login = False
    looking = WorkerPool([Redfish(bmcs=(BmcSettings("b1", double.url, allow_http=True, fast=0.2, sensors=0.6),))], "n1")
    inventories, seen, changes = list[Any](), tuple[str, ...](), 0
    until = time.monotonic() + 2 * COLLECT_SHARE
    while changes < 8 and time.monotonic() < until:
        for delivery in looking.tick(round(time.monotonic() * SECOND), 1.0).values():
            assert (delivery.state, delivery.reason) == ("ok", "")
            inventories += [delivery.inventory] if delivery.inventory is not None else []
            before, seen = seen, tuple(e for r in delivery.readings if r.device_class == "coolant" for e in r.entities)
            changes += bool(inventories) and "pump:b1.C1.2" in inventories[-1] and set(before) != set(seen)
        time.sleep(0.1)
    looking.close(3.0)
    assert changes == 8
    # a device that appears between the check for new ones and their list is reported twice
    assert sum(before == after for before, after in pairwise(inventories)) <= 1
    assert "pump:b1.C1.2" in inventories[-1]


def test_a_leak_event_is_reported_although_the_bmc_answers_no_request(
    double: Double, start_reader: StartReader
) -> None:
    reader = start_reader(double, leaks=600.0)
    reader.until(lambda: bool(double.streams.listeners) and reader.has(DETECTOR, "leak.state", 0)())
    double.fault("*", hold=threading.Event())
    reader.until(lambda: double.in_flight == 1)
    double.set(LEAK, "/DetectorState", "Critical")
    assert reader.until(reader.has(DETECTOR, "leak.state", 2)) < 1
    assert double.in_flight == 1
    double.clear_fault()


@pytest.mark.slow
def test_a_silent_stream_is_reopened(
    double: Double, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 60 < listening.SILENCE_S <= 600  # above the keep-alive comments of services, and not endless
    monkeypatch.setattr(watching, "SILENCE_S", 0.5)
    monkeypatch.setattr(listening, "STREAM_BACKOFF_S", 0.05)
    double.streams.keep_alive = 600.0
    reader = start_reader(double)
    reader.until(lambda: bool(double.streams.listeners))
    double.streams.emit({"MessageId": "ResourceEvent.1.3.ResourceChanged", "OriginOfCondition": LEAK})
    reader.until(lambda: len(double.requests_for(SSE_URI)) > 1, 5)
