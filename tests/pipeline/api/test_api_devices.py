"""Pages about one thing: the entity, newest values of its parts, several series on one time axis, its events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pipeline.api import device_routes as models
from pipeline.api.compare import natural_key
from pipeline.model.records import SECOND, iso
from pipeline.store.database import Database

SPAN = {"from": iso(1_790_000_000 * SECOND - 600 * SECOND), "to": iso(1_790_000_000 * SECOND)}


def _entity(client: httpx.Client, entity: str) -> models.EntityDetail:
    return models.EntityDetail.model_validate(client.get("/api/v1/entity", params={"entity": entity}).json())


def test_a_node_has_its_parts_parents_and_jobs(client: httpx.Client) -> None:
    found = _entity(client, "node:n1")
    assert found.above == ["rack:r1", "cdu:c1"]
    assert [part.entity for part in found.parts] == ["disk:n1.nvme0", "gpu:n1.0", "gpu:n1.1", "port:n1.mlx5_0"]
    assert [(work.job, work.ranks) for work in found.work] == [("job:81", ["rank:81.0", "rank:81.1"])]
    assert found.simulated


def test_incidents_of_an_entity_have_its_part_in_them(client: httpx.Client, open_incident: Any) -> None:
    open_incident("own", "gpu:n1.0")
    open_incident("over", "cdu:c1")
    open_incident("member", "gpu:n3.0", members=("gpu:n3.0", "gpu:n1.1"))
    open_incident("elsewhere", "node:n3")
    open_incident("past", "node:n1", state="resolved")
    open_incident("earlier", "cdu:c1", state="resolved")  # what supplies it supplied it then
    open_incident("slight", "cdu:c1", severity="watch", state="resolved")
    open_incident("work", "job:81", state="resolved")  # its jobs may have been others then
    found = {incident.id: incident.relation for incident in _entity(client, "node:n1").incidents}
    assert found == {"own": "cause", "over": "affected", "member": "member", "past": "cause", "earlier": "affected"}
    assert {incident.id for incident in _entity(client, "node:n1").incidents[-2:]} == {"past", "earlier"}
    assert {incident.id for incident in _entity(client, "gpu:n1.0").incidents} == {"own", "over", "earlier", "past"}


def test_an_entity_that_only_others_name_is_known(client: httpx.Client) -> None:
    assert [part.entity for part in _entity(client, "leaf:l1").parts] == ["port:n1.mlx5_0", "port:n3.mlx5_0"]


@pytest.mark.parametrize("entity", ["gpu:n9.9", "node:<b>x</b>", "port:\N{SNOWMAN}", "node:" + "n" * 253])
def test_an_unknown_entity_is_not_found(client: httpx.Client, entity: str) -> None:
    answer = client.get("/api/v1/entity", params={"entity": entity})
    assert answer.status_code == 404
    assert "is not known; GET /api/v1/entities lists all" in answer.json()["detail"]


def test_newest_values_stand_beside_those_of_peers_on_other_nodes(client: httpx.Client, database: Database) -> None:
    with database.transaction() as connection:
        for number in range(6):
            connection.execute("UPDATE latest_gpu SET temperature = ? WHERE device = ?", [40 + number, number])
    asked = {"entity": "node:n1", "signal": ["gpu.temperature", "gpu.sm_clock", "nic.state"], "max_age": 86400}
    found = models.Values.model_validate(client.get("/api/v1/values", params=asked).json())
    gpus = next(one for one in found.classes if one.device_class == "gpu")
    assert gpus.entities == ["gpu:n1.0", "gpu:n1.1"]
    assert gpus.last_seen[0] is not None
    temperature = gpus.signals[0]
    assert temperature.peers == 4  # two in the rack are too few for a band, so all others are compared
    assert temperature.peer_kind == "class"
    assert temperature.low is not None
    assert temperature.high is not None
    assert temperature.low <= (temperature.median or 0) <= temperature.high


def test_values_need_known_signals(client: httpx.Client) -> None:
    answer = client.get("/api/v1/values", params={"entity": "node:n1", "signal": "gpu.nonsense"})
    assert answer.status_code == 400
    assert "is not in the catalogue" in answer.json()["detail"]


def test_several_devices_and_signals_share_one_time_axis(client: httpx.Client) -> None:
    asked = {**SPAN, "entity": ["node:n1"], "signal": ["gpu.sm_clock", "gpu.energy", "gpu.temperature"], "points": 60}
    found = models.Comparison.model_validate(client.get("/api/v1/compare", params=asked).json())
    clock, energy, temperature = found.signals
    assert [line.entity for line in clock.lines] == ["gpu:n1.0", "gpu:n1.1"]
    assert {len(line.values) for line in clock.lines} == {60}
    assert {v for v in clock.lines[0].values if v is not None} == {1000.0}
    assert None in clock.lines[0].values  # a time without samples is a gap
    assert clock.peer_kind == "rack"
    assert clock.peers == 2
    assert clock.band is not None
    assert {v for v in clock.band.median if v is not None} == {1250.0}
    assert energy.signal.unit == "mJ/s"
    assert {v for v in energy.lines[1].values if v is not None} == {3000.0}
    assert temperature.step == 0


def test_a_comparison_is_simulated_if_any_device_of_it_is(client: httpx.Client, database: Database) -> None:
    """The node is asked for, its GPUs are drawn."""
    asked = {**SPAN, "entity": ["node:n1"], "signal": ["gpu.sm_clock"], "points": 60}
    for simulated, on in ((True, "gpu:n1.1"), (False, "gpu:n2.0")):
        with database.cursor() as cursor:
            cursor.execute("UPDATE device SET simulated = (entity = ?)", [on])
        assert client.get("/api/v1/compare", params=asked).json()["simulated"] is simulated


def test_a_gpu_stands_beside_its_cdu_without_the_other_gpus_of_the_cdu(client: httpx.Client) -> None:
    asked = {**SPAN, "entity": ["gpu:n1.0", "cdu:c1"], "signal": ["gpu.temperature", "coolant.flow"], "points": 60}
    found = models.Comparison.model_validate(client.get("/api/v1/compare", params=asked).json())
    assert [[line.entity for line in signal.lines] for signal in found.signals] == [["gpu:n1.0"], ["cdu:c1"]]
    assert found.signals[0].peers > 0
    assert found.signals[0].band is not None


def test_the_extremes_of_a_bucket_are_kept(client: httpx.Client, database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(
            "UPDATE hot_gpu SET temperature = 90 WHERE device = 0 AND time = (SELECT max(time) FROM hot_gpu)"
        )
    asked = {**SPAN, "entity": "gpu:n1.0", "signal": "gpu.temperature", "points": 6}
    found = models.Comparison.model_validate(client.get("/api/v1/compare", params=asked).json())
    line = found.signals[0].lines[0]
    assert line.high is not None
    assert line.high[-1] == 90
    assert line.values[-1] is not None
    assert line.values[-1] < 60


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"entity": "n1", "signal": "gpu.power"}, "expected kind:name"),
        ({"entity": "gpu:n1.0", "signal": "gpu.nonsense"}, "is not in the catalogue"),
        ({"entity": "gpu:n1.0", "signal": [f"gpu.{n}" for n in ("power", "energy", "temperature", "sm_clock",
          "memory_clock", "utilization", "processes", "memory_used", "memory_total")]}, "expected 1 to 8"),
        ({"entity": [f"gpu:n1.{i}" for i in range(17)], "signal": "gpu.power"}, "at most 16"),
    ],
)  # fmt: skip
def test_a_wrong_comparison_says_what_was_expected(client: httpx.Client, query: dict[str, Any], text: str) -> None:
    answer = client.get("/api/v1/compare", params=query)
    assert answer.status_code == 400
    assert text in answer.json()["detail"]


def test_an_entity_without_the_signal_has_no_lines(client: httpx.Client) -> None:
    asked = {**SPAN, "entity": "port:n1.mlx5_0", "signal": "gpu.sm_clock"}
    found = models.Comparison.model_validate(client.get("/api/v1/compare", params=asked).json())
    assert found.signals[0].lines == []
    assert found.signals[0].band is None


def test_events_of_parts_are_listed_with_their_data(client: httpx.Client, database: Database, now: int) -> None:
    with database.transaction() as connection:
        for entity, kind, data in (
            ("gpu:n1.0", "xid", {"xid": 79, "name": "GPU has fallen off the bus"}),
            ("node:n1", "collector", {"collector": "nvml", "state": "no data", "reason": "x"}),
            ("gpu:n3.0", "xid", {"xid": 48}),
            ("node:n1", "inventory", {"entities": []}),
        ):
            connection.execute(
                "INSERT INTO events (time, entity, kind, data, site, node, simulated) "
                "VALUES (make_timestamptz(?), ?, ?, ?, 'local', 'n1', true)",
                [now - 10 * SECOND, entity, kind, json.dumps(data)],
            )
        connection.execute(
            "INSERT INTO gaps VALUES (make_timestamptz(?), 'samples', 'n1', 'e', 3, 8, 'spool full')",
            [now - 20 * SECOND],
        )
    answer = client.get("/api/v1/events", params={"entity": "node:n1", **SPAN}).json()
    found = models.EventItems.model_validate(answer)
    assert [(i.type, i.subject) for i in found.items][:3] == [
        ("event", "xid"),
        ("event", "collector"),
        ("gap", "samples"),
    ]
    assert found.items[0].data["xid"] == 79
    assert found.items[2].data == {"messages": 5, "cause": "spool full"}
    assert not found.truncated
    assert client.get("/api/v1/events", params={"entity": "node:n1", "limit": 1, **SPAN}).json()["truncated"]


def test_names_sort_by_their_numbers() -> None:
    assert sorted(["gpu:n1.10", "gpu:n1.9", "gpu:n1.x"], key=natural_key) == ["gpu:n1.9", "gpu:n1.10", "gpu:n1.x"]
