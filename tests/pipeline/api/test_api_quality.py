"""GET /api/v1/quality: silent and failing sources by cause, detectors that they disable, lost or rejected data."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from pipeline.api.backend import SenderStates
from pipeline.api.quality.blind import BlindSpots
from pipeline.api.quality.groups import group_problems
from pipeline.api.quality.routes import Quality
from pipeline.api.quality.sources import SourceProblem, find_problems
from pipeline.api.quality.space import Growth, find_full, read_growth
from pipeline.api.server import create_app
from pipeline.config.sections import Config, Store
from pipeline.ingest.topic_lag import TopicLag
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import Topology
from pipeline.store.database import reserved_bytes
from pipeline.store.latest import CurrentValues
from tests.pipeline.api.conftest import NOW, PARENTS, InProcess, StoreBackend

HOSTILE = '<b>n"1</b>: ☃'


def add_device(backend: StoreBackend, device_class: str, number: int, entity: str, node: str, **values: Any) -> None:
    """Adds a device and its newest row, 5 s old."""
    with backend.database.transaction() as connection:
        row = [device_class, number, entity, node]
        connection.execute("INSERT INTO device VALUES (?, ?, 'local', ?, ?, true)", row)
        names = "".join(f', "{name}"' for name in values)
        marks = ", ?" * len(values)
        connection.execute(
            f'INSERT INTO "latest_{device_class}" (time, device{names}) VALUES (make_timestamptz(?), ?{marks})',
            [NOW - 5 * SECOND, number, *values.values()],
        )


def add_event(backend: StoreBackend, entity: str, kind: str, seconds_ago: int, **data: Any) -> None:
    """Adds an event of the node n1."""
    with backend.database.transaction() as connection:
        connection.execute(
            """INSERT INTO events (time, entity, kind, data, site, node, simulated)
               VALUES (make_timestamptz(?), ?, ?, ?, 'local', 'n1', true)""",
            [NOW - seconds_ago * SECOND, entity, kind, json.dumps(data)],
        )


def senders(silent: tuple[str, ...] = ("n3",), ago: int = 300, **changes: Any) -> SenderStates:
    """The nodes n1 to n3, some of them silent."""
    times = {n: NOW - (ago if n in silent else 2) * SECOND for n in ("n1", "n2", "n3")}
    made = SenderStates(times, times, dict.fromkeys(times, 5 * SECOND), {}, ())
    return replace(made, **changes)


def rows_of(client, kind: str) -> list[dict[str, Any]]:
    return [row for row in client.get("/api/v1/quality").json()["problems"] if row["kind"] == kind]


def test_a_silent_agent_is_a_row_with_its_time_and_the_detectors_that_it_blinds(client, backend) -> None:
    backend.senders = senders()
    silent, unheard = rows_of(client, "agent")
    assert (silent["state"], silent["count"], silent["examples"]) == ("silent", 1, ["agent:n3"])
    assert silent["since"] == iso(NOW - 300 * SECOND)
    assert "straggler_inferred" in silent["blinds"]["detectors"]  # it needs the clocks of GPUs
    assert silent["blinds"]["devices"] == {"gpu": 2}
    assert (unheard["state"], unheard["examples"]) == ("never reported", ["agent:n4"])
    agents = client.get("/api/v1/quality").json()["agents"]
    assert (agents["known"], agents["reporting"], agents["silent"]) == (3, 2, 1)


@pytest.mark.slow
def test_a_slow_sender_is_not_silent_before_three_of_its_intervals(client, backend) -> None:
    backend.senders = senders(ago=170, intervals={"n3": 60 * SECOND})
    assert [row["state"] for row in rows_of(client, "agent")] == ["never reported"]


def test_all_silent_agents_of_a_rack_are_one_row(client, backend) -> None:
    backend.senders = senders(("n1", "n2"))
    row = rows_of(client, "agent")[0]
    assert (row["count"], row["shared"], row["racks"]) == (2, "rack:r1", 1)
    members = client.get(f"/api/v1/quality/{row['id']}", params={"limit": 1, "offset": 1}).json()
    assert (members["total"], [m["entity"] for m in members["members"]]) == (2, ["agent:n2"])
    assert client.get("/api/v1/quality/gone").status_code == 404


@pytest.mark.slow
def test_a_collector_is_shown_with_the_reason_that_it_reported(client, backend) -> None:
    backend.senders = senders(())
    add_device(backend, "collector", 0, "collector:n1.nvml", "n1", state=3, silence=90.0)
    add_device(backend, "collector", 1, "collector:n2.infiniband", "n2", state=2, silence=90.0)
    add_device(backend, "collector", 2, "collector:n2.nvml", "n2", state=1, silence=1.0)
    add_event(backend, "node:n1", "collector", 120, collector="nvml", state="fault", reason=HOSTILE)
    add_event(backend, "node:n1", "collector", 60, collector="nvml", state="ok", reason="")
    failing, idle = rows_of(client, "collector")
    assert (failing["part"], failing["state"], failing["reason"]) == ("nvml", "fault", HOSTILE)
    assert failing["since"] == iso(NOW - 120 * SECOND)
    assert (idle["part"], idle["expected"], idle["blinds"]["detectors"]) == ("infiniband", True, [])


def test_bmcs_exporters_tools_disks_and_clocks_are_sources_too(client, backend) -> None:
    backend.senders = senders((), clock_errors={"n2": -8 * SECOND}, newer=("n3",))
    add_device(backend, "bmc", 0, "bmc:n1", "n1", reachable=0)
    add_device(backend, "exporter", 0, "exporter:dcgm", "n1", up=0)
    add_event(backend, "bmc:n1", "bmc_lost", 90, reason="certificate verify failed")
    add_event(backend, "exporter:dcgm", "exporter", 80, state="down", reason="connection refused")
    add_event(backend, "node:n1", "fabric_tool", 70, tool="ibdiagnet", state="failing", reason="not found")
    add_event(backend, "node:n1", "disk_slow", 60, state="active", seconds=12.5, waiting=7)
    add_event(backend, "node:n1", "fabric_tool", 70, tool="iblinkinfo", state="failing", reason="x")
    add_event(backend, "node:n1", "fabric_tool", 60, tool="iblinkinfo", state="ok", reason="")
    found = {(r["kind"], r["part"]): r for r in client.get("/api/v1/quality").json()["problems"]}
    assert found["bmc", ""]["reason"] == "certificate verify failed"
    assert found["exporter", ""]["reason"] == "connection refused"
    assert found["tool", "ibdiagnet"]["reason"] == "not found"
    assert ("tool", "iblinkinfo") not in found
    assert found["disk", ""]["reason"] == "messages wait 12.5 s, 7 waiting"
    assert (found["clock", ""]["state"], found["clock", ""]["reason"]) == ("behind", "8 s")
    assert found["agent", ""]["state"] == "newer than the pipeline"


def test_what_a_silent_agent_reported_last_is_not_a_problem_of_its_own(client, backend) -> None:
    backend.senders = senders(("n1",))
    add_device(backend, "collector", 0, "collector:n1.nvml", "n1", state=3, silence=90.0)
    assert rows_of(client, "collector") == []


def test_rejected_telemetry_is_the_reason_of_a_silence(client, backend) -> None:
    backend.senders = senders(("n1",))
    add_event(backend, "node:n1", "messages_rejected", 280, count=9, rules={"bounds": 9}, since=iso(NOW))
    row = rows_of(client, "agent")[0]
    assert (row["state"], row["reason"]) == ("rejected", "rules: bounds")


def test_losses_are_counted_with_cause_sender_and_time(client, backend) -> None:
    hour_ago, before = NOW - 3600 * SECOND, NOW - 40 * 86_400 * SECOND
    with backend.database.transaction() as connection:
        for time_, first, after, cause in ((hour_ago, 0, 7, "spool full"), (before, 0, 3, "spool full")):
            connection.execute(
                "INSERT INTO gaps VALUES (make_timestamptz(?), 'telemetry.v1', 'n1', 'e', ?, ?, ?)",
                [time_, first, after, cause],
            )
        connection.execute(
            """INSERT INTO dead_letter (time, topic, partition, "offset", reason, payload, rule, "key")
               VALUES (make_timestamptz(?), 'telemetry.v1', '0', 1, 'power of gpu:n1.0 is 1e9', 'x', 'bounds', ?)""",
            [hour_ago, b"\xff" + HOSTILE.encode()],
        )
    backend.counts = {'fleetpulse_rows_late_total{class="gpu"}': 4.0, 'fleetpulse_rows_late_total{class="nic"}': 0.0}
    found = client.get("/api/v1/quality").json()
    Quality.model_validate(found)
    (gap,) = found["gaps"]
    assert (gap["messages"], gap["last_day"], gap["examples"]) == (10, 7, ["n1"])
    assert (sum(found["gap_hours"]), found["gap_hours"][23]) == (7, 7)
    (letter,) = found["rejected"]
    assert (letter["rule"], letter["sender"]) == ("bounds", "�" + HOSTILE)
    assert found["late"] == {"gpu": 4}


@pytest.mark.slow
def test_versions_are_counted_over_the_nodes(client, backend) -> None:
    with backend.database.transaction() as connection:
        for node, version in (("n1", "1.2"), ("n2", "1.2"), ("n3", HOSTILE)):
            text = json.dumps({"agent": version})
            connection.execute("UPDATE entity SET attributes = ? WHERE entity = ?", [text, f"node:{node}"])
    found = client.get("/api/v1/quality").json()["versions"]
    assert [(v["version"], v["nodes"], v["examples"][0]) for v in found] == [
        ("1.2", 2, "node:n1"),
        (HOSTILE, 1, "node:n3"),
    ]


def test_an_empty_store_has_no_problems_and_says_so(client, backend) -> None:
    with backend.database.transaction() as connection:
        for table in ("entity", "device", "hot_gpu", "latest_gpu", "latest_coolant"):
            connection.execute(f"DELETE FROM {table}")
    found = client.get("/api/v1/quality").json()
    assert (found["problems"], found["agents"]["known"], found["agents"]["age_p50"]) == ([], 0, None)


def test_a_detector_counts_the_devices_that_it_cannot_judge(client, backend) -> None:
    backend.senders = senders()
    found = {row["detector"]: row for row in client.get("/api/v1/quality").json()["detectors"]}
    clocks = found["straggler_inferred"]
    assert (clocks["devices"], clocks["blind"], clocks["missing"]) == (6, 2, "gpu.sm_clock")
    assert found["xid"]["blind"] == 0  # it needs only events


# --- size -------------------------------------------------------------------------------------------------------------


def test_whole_racks_have_a_row_each_and_scattered_nodes_one_together() -> None:
    parents = {f"node:n{i}": (f"rack:r{i // 8}",) for i in range(64)}
    wanted = [*range(8), *range(16, 21), 40, 50]
    problems = [SourceProblem("agent", "", "silent", f"agent:n{i}", f"n{i}", NOW, "") for i in wanted]
    racks = {f"rack:r{i}": 8 for i in range(8)}
    found = group_problems(problems, Topology(parents), racks)
    assert [(g.shared, len(g.problems)) for g in found] == [("rack:r0", 8), ("rack:r2", 5), ("", 2)]


def test_reasons_that_differ_in_names_and_numbers_are_one_row() -> None:
    problems = [
        SourceProblem("bmc", "", "x", f"bmc:n{i}", "row1", NOW, f"https://n{i}/redfish: no answer in {i}.5 s")
        for i in range(5)
    ]
    assert len(group_problems(problems, Topology(), {})) == 1


@pytest.mark.parametrize("nodes", [12_500])
def test_problems_of_a_large_fleet_are_found_and_grouped_in_bounded_time(nodes: int) -> None:
    names = [f"n{i}" for i in range(nodes)]
    times = {name: NOW - (3600 if i % 2 else 2) * SECOND for i, name in enumerate(names)}
    states = SenderStates(times, times, {}, {}, ())
    topology = Topology({f"node:{name}": (f"rack:r{i // 18}",) for i, name in enumerate(names)})
    racks = {f"rack:r{i}": 18 for i in range(nodes // 18 + 1)}

    class NoDevices:
        def names(self, device_class: str) -> list[str]:
            return []

        def origins(self, device_class: str) -> list[tuple[str, str, bool]]:
            return []

    def read(device_class: str, columns: object) -> CurrentValues:
        return CurrentValues({}, {}, np.zeros(0, np.int64), np.zeros(0, np.int32))

    begun = time.process_time()
    problems = find_problems(read, NoDevices(), states, {}, [], NOW)
    found = group_problems(problems, topology, racks)
    assert (len(problems), len(found)) == (nodes // 2, 1)
    assert time.process_time() - begun < 1.0


def test_blind_spots_need_a_signal_that_others_have(backend: StoreBackend) -> None:
    from pipeline.api.heatmap import FleetNames

    detectors = [{"name": "d", "class": "gpu", "needs": ["gpu.power"], "wants": [], "off": [], "errors": 0}]
    found = BlindSpots.read(backend.read_current, backend.devices, FleetNames(), detectors, NOW)
    assert found.find_blinded({"n1"}).detectors == ()  # no GPU of the fleet has it: the hardware lacks it
    assert PARENTS["node:n1"] == ("rack:r1",)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("per_day", "held", "free", "full_s"),
    [
        (None, 0, 50, None),  # nothing is sealed yet
        (2 * GIB, 20 * GIB, 50, 49 * 43_200),  # 1 GiB stays free, 2 GiB a day
        (2 * GIB, 90 * GIB, 50, None),  # at most 100 GiB of history: 10 more
        (GIB // 10, 0, 50, None),  # 90 days of it are 9 GiB
        (2 * GIB, 0, 1, 0),
    ],
)
def test_the_disk_is_full_when_history_takes_its_room_before_the_retention_ends_it(per_day, held, free, full_s):
    store, total = Store(telemetry_bytes=100 * GIB, telemetry_days=90), 1000 * GIB
    assert find_full(Growth(held, per_day), store, free * GIB, total, GIB) == full_s


def test_the_growth_of_history_is_that_of_the_newest_sealed_week(backend):
    def read() -> Growth:
        with backend.database.cursor() as cursor:
            return read_growth(cursor)

    assert read() == Growth(0, None)
    now = backend.clock()
    files = (("a", 0, 30 * 24, 5000), ("b", 0, 4, 100), ("c", 60, 4, 10), ("d", 0, 3, 100), ("e", 60, 3, 10))
    with backend.database.transaction() as connection:
        for path, step, hours, size in files:
            first = now - hours * 3600 * SECOND
            connection.execute(
                "INSERT INTO sealed VALUES (?, 'gpu', ?, 'local', '2026-01-01', make_timestamptz(?), "
                "make_timestamptz(?), 1, ?)",
                [path, step, first, first + 3600 * SECOND, size],
            )
    assert read() == Growth(5220, 220 * 12)  # 220 bytes in the two hours of the last week


def test_the_space_that_stays_free_is_at_most_a_twentieth_of_the_disk(backend, tmp_path) -> None:
    store = replace(Config().store, path=tmp_path / "store.duckdb")
    app = create_app(backend, replace(Config(), store=store), lambda: NOW)
    with httpx.Client(transport=InProcess(app), base_url="http://127.0.0.1:8600") as client:
        disk = client.get("/api/v1/quality").json()["disk"]
    total = shutil.disk_usage(store.path.parent).total
    assert (disk["total"], disk["minimum"]) == (total, min(store.free_bytes, total // 20))
    assert reserved_bytes(1 << 40, 100) == 5
    assert reserved_bytes(3, 100) == 3


def test_the_lag_of_topics_is_that_of_ingest_and_none_is_made_up(client, backend) -> None:
    backend.lags = {"telemetry.v1": TopicLag(3840, 5.6, 74.0, 131.0)}
    table = client.get("/api/v1/quality").json()
    wanted = {"topic": "telemetry.v1", "messages": 3840, "p50": 5.6, "p99": 74.0, "longest": 131.0}
    assert (table["lags"], table["lag_window_s"]) == ([wanted], 300.0)
    backend.lags = {}
    assert client.get("/api/v1/quality").json()["lags"] == []


def test_duplicates_are_those_that_ingest_counted(client, backend) -> None:
    backend.counts = {"fleetpulse_ingest_duplicates_total": 17.0}
    assert client.get("/api/v1/quality").json()["duplicates"] == 17
