"""Data that the dashboard reads: entities, fleet state, series with peers, timelines, and SQL results."""

from __future__ import annotations

from typing import Any

import duckdb
import httpx
import pyarrow as pa
import pytest

from pipeline.api import models
from pipeline.api.routes import _ENTITIES
from pipeline.model.records import SECOND, iso
from pipeline.store import schema
from pipeline.store.database import Database

SERIES = "/api/v1/series"


def _states(client: httpx.Client) -> dict[str, str]:
    fleet = models.Fleet.model_validate(client.get("/api/v1/fleet").json())
    assert sum(fleet.counts.values()) == len(fleet.nodes)
    return {node.entity: node.state for node in fleet.nodes}


def test_entities_are_listed_all_or_by_kind(client: httpx.Client) -> None:
    everything = models.Entities.model_validate(client.get("/api/v1/entities").json()).entities
    nodes = models.Entities.model_validate(client.get("/api/v1/entities?kind=node").json()).entities
    assert [n.entity for n in nodes] == ["node:n1", "node:n2", "node:n3", "node:n4"]
    assert {"gpu", "rank", "cdu", "rack"} <= {e.kind for e in everything}
    gpu = next(e for e in everything if e.entity == "gpu:n1.0")
    assert gpu.parents == ["node:n1"]
    assert gpu.last_seen is not None


def test_an_empty_store_has_no_entities() -> None:
    with duckdb.connect() as fresh:
        schema.create_tables(fresh, 0)
        assert fresh.sql(_ENTITIES, params=[None]).fetchall() == []


def test_a_job_was_last_seen_when_its_ranks_were_last_seen(client: httpx.Client, database: Database, now: int) -> None:
    database.connection.execute("INSERT INTO device VALUES ('node', 0, 'local', 'node:n1', 'n1', true)")
    database.connection.execute("INSERT INTO device VALUES ('rank', 9, 'local', 'rank:82.0', 'n1', true)")
    for device_class, number, moment in (("node", 0, now), ("rank", 9, now - SECOND)):
        database.connection.execute(
            f"INSERT INTO latest_{device_class} (time, device) VALUES (make_timestamptz(?), ?)", [moment, number]
        )
    lines = [
        ("job:81", "job", [], "{}"),
        ("stage:81.0", "stage", ["job:81"], "{}"),
        ("rank:81.0", "rank", ["stage:81.0", "job:81", "gpu:n1.0"], '{"node": "n1"}'),
        ("job:82", "job", [], "{}"),
        ("rank:82.0", "rank", ["job:82", "gpu:n1.1"], '{"node": "n1"}'),
        ("job:83", "job", [], "{}"),
    ]
    for line in lines:
        database.connection.execute(
            "INSERT OR REPLACE INTO entity (entity, kind, site, simulated, parents, attributes) "
            "VALUES ($1, $2, 'local', false, $3, $4)",
            line,
        )
    found = {e["entity"]: e["last_seen"] for e in client.get("/api/v1/entities").json()["entities"]}
    assert {found[e] for e in ("job:81", "stage:81.0", "rank:81.0")} == {iso(now)}
    assert found["job:82"] == found["rank:82.0"] == iso(now - SECOND)
    assert found["job:83"] is None
    jobs = client.get("/api/v1/entities?kind=job").json()["entities"]
    assert {e["entity"]: e["last_seen"] for e in jobs}.items() <= found.items()


def test_a_fleet_without_incidents_is_ok_where_it_reports_and_no_data_elsewhere(client: httpx.Client, now: int) -> None:
    body = client.get("/api/v1/fleet").json()
    assert body["as_of"] == iso(now)
    assert body["watermark"] == iso(now - 30 * SECOND)
    assert body["sources"]["silent"] == 1
    assert _states(client) == {"node:n1": "ok", "node:n2": "ok", "node:n3": "no_data", "node:n4": "no_data"}
    nodes = {n["entity"]: n for n in body["nodes"]}
    assert nodes["node:n3"]["last_seen"] == iso(now - 300 * SECOND)
    assert (nodes["node:n4"]["last_seen"], nodes["node:n4"]["rack"]) == (None, "rack:r2")


def test_the_fleet_lists_some_nodes_or_none_and_counts_all(client: httpx.Client) -> None:
    for query, listed in (("nodes=false", []), ("entity=node:n2&entity=node:n9", ["node:n2"])):
        fleet = models.Fleet.model_validate(client.get(f"/api/v1/fleet?{query}").json())
        assert [node.entity for node in fleet.nodes] == listed
        assert sum(fleet.counts.values()) == 4
        assert fleet.simulated == 4


def test_the_fleet_shows_why_no_data_arrives_and_the_age_of_its_newest_data(
    client: httpx.Client, backend: Any, now: int
) -> None:
    fleet = models.Fleet.model_validate(client.get("/api/v1/fleet").json())
    assert (fleet.unready, fleet.stalled, fleet.newest) == ([], False, iso(now))
    backend.reasons = ["kafka k1:9092: no answer"]
    backend.standing = {**backend.standing, "stalled": True}
    fleet = models.Fleet.model_validate(client.get("/api/v1/fleet").json())
    assert (fleet.unready, fleet.stalled) == (["kafka k1:9092: no answer"], True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("severity", "state"), [("page", "critical"), ("ticket", "degraded"), ("watch", "watch")]
)  # fmt: skip
@pytest.mark.parametrize("cause", ["node:n1", "gpu:n1.1", "port:n1.mlx5_0", "rank:81.0", "disk:n1.nvme0"])
def test_an_incident_on_a_node_or_on_a_part_of_it_sets_the_state_of_the_node(
    client: httpx.Client, open_incident: Any, cause: str, severity: str, state: str
) -> None:
    open_incident("inc-1", cause, severity)
    assert _states(client)["node:n1"] == state
    assert _states(client)["node:n2"] == "ok"


def test_nodes_below_a_faulty_rack_loop_or_leaf_are_affected_and_not_at_fault(
    client: httpx.Client, open_incident: Any
) -> None:
    open_incident("inc-1", "leaf:l1")
    open_incident("inc-2", "cdu:c1", "ticket")
    open_incident("inc-3", "gpu:n2.0", "ticket")
    body = client.get("/api/v1/fleet").json()
    nodes = {n["entity"]: n for n in body["nodes"]}
    shown = {entity[5:]: (n["state"], n["incidents"], n["affected_by"]) for entity, n in nodes.items()}
    assert shown == {
        "n1": ("ok", ["inc-1", "inc-2"], ["inc-1", "inc-2"]),
        "n2": ("degraded", ["inc-3", "inc-2"], ["inc-2"]),
        "n3": ("no_data", ["inc-1"], ["inc-1"]),
        "n4": ("no_data", [], []),
    }
    assert (body["affected"], body["counts"]["degraded"]) == (1, 1)


def test_no_data_has_priority_over_all_but_a_critical_incident(client: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n3.0", "ticket")
    assert _states(client)["node:n3"] == "no_data"
    open_incident("inc-2", "gpu:n3.0", "page")
    assert _states(client)["node:n3"] == "critical"


def test_a_resolved_incident_and_a_job_as_the_cause_change_no_node_state(
    client: httpx.Client, open_incident: Any
) -> None:
    open_incident("inc-1", "gpu:n1.0", state="resolved")
    open_incident("inc-2", "job:81")
    assert _states(client)["node:n1"] == "ok"


def test_a_gpu_is_shown_with_the_other_gpus_of_its_rack(client: httpx.Client, now: int) -> None:
    params = {"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "from": iso(now - 600 * SECOND), "to": iso(now)}
    answer = client.get(SERIES, params={**params, "points": 30})
    series = models.Series.model_validate(answer.json())
    assert (series.peer_kind, series.peers, len(series.points)) == ("rack", 3, 30)
    assert series.signal.unit == "MHz"
    first = series.points[0]
    assert (first.value, first.median, first.low, first.high) == (1000.0, 1200.0, 1120.0, 1280.0)
    assert [p.time for p in series.points[:2]] == [iso(now - 600 * SECOND), iso(now - 580 * SECOND)]


def test_peers_of_a_class_are_all_others_and_a_stage_contains_its_ranks(client: httpx.Client) -> None:
    everybody = client.get(SERIES, params={"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "peers": "class"}).json()
    assert (everybody["peer_kind"], everybody["peers"]) == ("class", 5)
    rank = client.get(SERIES, params={"entity": "rank:81.0", "signal": "rank.compute_time"}).json()
    assert (rank["peer_kind"], rank["peers"]) == ("stage", 2)
    loop = client.get(SERIES, params={"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "peers": "loop"}).json()
    assert (loop["peer_kind"], loop["peers"]) == ("loop", 3)
    alone = client.get(SERIES, params={"entity": "cdu:c1", "signal": "coolant.flow"}).json()
    assert (alone["peer_kind"], alone["peers"]) == ("class", 0)


def test_a_counter_is_shown_as_a_rate_without_a_value_at_its_reset(client: httpx.Client, now: int) -> None:
    params = {"entity": "gpu:n1.0", "signal": "gpu.energy", "from": iso(now - 600 * SECOND), "to": iso(now)}
    series = client.get(SERIES, params={**params, "points": 60}).json()
    assert series["signal"]["unit"] == "mJ/s"
    values = [p["value"] for p in series["points"]]
    assert values.count(3000.0) == 58
    assert values.count(None) == 2  # the first row has no row before it; the rate across the reset is unknown
    assert {p["median"] for p in series["points"][1:]} == {3000.0}


def test_a_counter_that_passes_its_old_value_after_a_reset_has_no_rate_there(
    client: httpx.Client, database: Database, now: int
) -> None:
    with database.transaction() as connection:
        connection.execute(
            "UPDATE hot_gpu SET generation = CASE WHEN time < make_timestamptz(?) THEN 7 ELSE 9 END WHERE device = 1",
            [now - 300 * SECOND],
        )
    params = {"entity": "gpu:n1.1", "signal": "gpu.energy", "from": iso(now - 600 * SECOND), "to": iso(now)}
    values = [p["value"] for p in client.get(SERIES, params={**params, "points": 60}).json()["points"]]
    assert values.count(3000.0) == 58
    assert [i for i, value in enumerate(values) if value is None] == [0, 30]


def test_missing_data_is_a_run_of_points_without_values_and_nan_is_null(client: httpx.Client, now: int) -> None:
    params = {"entity": "gpu:n3.0", "signal": "gpu.temperature", "from": iso(now - 600 * SECOND), "to": iso(now)}
    values = [p["value"] for p in client.get(SERIES, params={**params, "points": 60}).json()["points"]]
    assert values[:30].count(None) == 1
    assert values[31:] == [None] * 29


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"entity": "gpu:n1.0", "signal": "gpu.nope"}, "catalogue"),
        ({"entity": "node:n1", "signal": "gpu.sm_clock"}, "gpu"),
        ({"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "from": "yesterday"}, "from"),
        ({"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "from": "2030-01-01", "to": "2020-01-01"}, "before"),
        ({"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "points": "0"}, "points"),
        ({"entity": "gpu:n1.0", "signal": "gpu.sm_clock", "peers": "friends"}, "peers"),
        ({"entity": "nonsense", "signal": "gpu.sm_clock"}, "entity"),
    ],
)
def test_an_invalid_series_is_a_400_that_names_the_reason(
    client: httpx.Client, params: dict[str, str], named: str
) -> None:
    answer = client.get(SERIES, params=params)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]


def test_the_timeline_lists_events_of_the_entity_and_of_its_ancestors(
    client: httpx.Client, database: Database, now: int
) -> None:
    with database.transaction() as connection:
        for ago, entity, kind, data in (
            (50, "gpu:n1.0", "xid", '{"code": 79, "text": "fell off the bus"}'),
            (40, "rack:r1", "maintenance", "{}"),
            (30, "gpu:n1.1", "xid", '{"code": 31}'),
            (20, "gpu:n1.0", "inventory", "{}"),
            (10, "gpu:n1.0", "digest", '{"digest": "bad"}'),
            (5, "gpu:n1.0", "digest", '{"digest": "good"}'),
        ):
            connection.execute(
                "INSERT INTO events (time, entity, kind, data, site, node, simulated)"
                " VALUES (make_timestamptz(?), ?, ?, ?, 'local', 'n1', true)",
                [now - ago * SECOND, entity, kind, data],
            )
        connection.execute(
            """INSERT INTO findings SELECT t, t, 'gpu:n1.0', 'sdc', 'page', 1.0, 'wrong digest', '{"digest": "bad"}',
               ['event:digest'], NULL FROM (SELECT make_timestamptz(?) AS t)""",
            [now - 8 * SECOND],
        )
        connection.execute(
            "INSERT INTO gaps VALUES (make_timestamptz(?), 'telemetry.v1', 'n1', 'e', 10, 15, 'spool full')",
            [now - 7 * SECOND],
        )
    timeline = models.Timeline.model_validate(client.get("/api/v1/timeline", params={"entity": "gpu:n1.0"}).json())
    assert [(i.kind, i.entity, i.text) for i in timeline.items] == [
        ("gap", "node:n1", "telemetry.v1: 5 messages lost: spool full"),
        ("finding", "gpu:n1.0", "page sdc: wrong digest"),
        ("event", "gpu:n1.0", "digest: digest bad"),
        ("event", "rack:r1", "maintenance"),
        ("event", "gpu:n1.0", "xid: code 79, text fell off the bus"),
    ]
    assert len(client.get("/api/v1/timeline", params={"entity": "gpu:n1.0", "limit": 2}).json()["items"]) == 2


def test_the_catalogue_is_served(client: httpx.Client) -> None:
    signals = models.Signals.model_validate(client.get("/api/v1/signals").json()).signals
    assert any(s.name == "gpu.sm_clock" and s.column == "sm_clock" for s in signals)


def _sql(client: httpx.Client, query: str, accept: str = "application/json") -> Any:
    return client.post("/api/v1/sql", json={"query": query}, headers={"accept": accept})


@pytest.mark.slow
def test_sql_answers_json_with_null_for_missing_values(client: httpx.Client, now: int) -> None:
    answer = _sql(client, "SELECT max(time), count(*), sum(sm_clock), 'nan'::FLOAT, NULL, 'a'::BLOB FROM gpu")
    body = models.Rows.model_validate(answer.json())
    assert body.rows[0] == [iso(now - SECOND), 360, 171000, None, None, "YQ=="]
    assert not body.truncated


@pytest.mark.slow
def test_sql_keeps_integers_exact_and_nested_values_nested(client: httpx.Client) -> None:
    query = """SELECT 9007199254740993, 18446744073709551615::UBIGINT, sum(x), 1.5::DECIMAL(4, 1), [1, NULL],
               {'a': 'b'},
               map {'k': 1}, [TIMESTAMPTZ '2026-01-01 00:00:00Z'], DATE '2026-01-01', INTERVAL '1 day', 'inf'::DOUBLE,
               TIMESTAMP '2026-01-01', true, '101'::VARCHAR, 170141183460469231731687303715884105727
               FROM (VALUES (9007199254740993)) t(x)"""
    assert _sql(client, query).json()["rows"] == [
        [9007199254740993, 18446744073709551615, 9007199254740993, 1.5, [1, None], {"a": "b"}, [["k", 1]],
         ["2026-01-01T00:00:00.000000Z"], "2026-01-01", [0, 1, 0], None, "2026-01-01T00:00:00.000000Z", True, "101",
         170141183460469231731687303715884105727]
    ]  # fmt: skip


@pytest.mark.slow
def test_sql_answers_arrow_on_request(client: httpx.Client) -> None:
    answer = _sql(client, "SELECT time, entity, sm_clock FROM gpu", "application/vnd.apache.arrow.stream")
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert answer.headers["x-truncated"] == "false"
    table = pa.ipc.open_stream(answer.content).read_all()
    assert (table.num_rows, table.column_names) == (360, ["time", "entity", "sm_clock"])
    assert table.schema.field("time").type == pa.timestamp("us", "UTC")


@pytest.mark.slow
def test_refused_sql_is_a_problem_with_the_reason(client: httpx.Client) -> None:
    for query in ("DROP VIEW gpu", "SELECT 1; DROP VIEW gpu", "SELECT * FROM read_csv('/etc/passwd')", "SELECT x"):
        answer = _sql(client, query)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert _sql(client, "SELECT count(*) FROM gpu").json()["rows"] == [[360]]
