"""The fleet map as bytes, its layouts, and what a selection of nodes has in common."""

from __future__ import annotations

import base64
import math
from typing import Any

import httpx
import numpy as np
import pytest

from pipeline.acts.act import Act
from pipeline.acts.ledger import save_act
from pipeline.api import map_routes
from pipeline.api.fleet_groups import FleetGroups, find_pairs
from pipeline.api.fleet_map import (
    AFFECTED,
    DRAINED,
    SCALES,
    SIMULATED,
    UNKNOWN,
    ages_of,
    deviations,
    quantize,
)
from pipeline.api.heatmap import DeviceValues
from pipeline.api.share import _HypergeometricTail, compare_shares, make_attributes
from pipeline.model.records import SECOND, from_iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from tests.pipeline.api.conftest import Open, StoreBackend

OK, WATCH, DEGRADED, CRITICAL, NO_DATA = range(5)


def fleet_map(client: httpx.Client, query: str = "") -> dict[str, Any]:
    answer = client.get(f"/api/v1/fleet/map?{query}")
    assert answer.status_code == 200, answer.text
    map_routes.FleetMap.model_validate(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def layout(client: httpx.Client, query: str = "") -> dict[str, Any]:
    answer = client.get(f"/api/v1/fleet/layout?{query}")
    assert answer.status_code == 200, answer.text
    map_routes.FleetLayout.model_validate(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def share(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/api/v1/share", json=body)
    assert answer.status_code == 200, answer.text
    map_routes.Share.model_validate(answer.json())
    found: dict[str, Any] = answer.json()
    return found


def numbers(text: str) -> list[int]:
    return list(base64.b64decode(text))


def states(found: dict[str, Any]) -> list[int]:
    return [look & ~SIMULATED for look in numbers(found["looks"])]


def test_the_map_has_one_byte_per_cell_in_the_order_of_the_layout(client: httpx.Client) -> None:
    found, cells = fleet_map(client), layout(client)
    assert cells["groups"] == [["rack:r1", 2], ["rack:r2", 2]]
    assert cells["names"] == ["node:n1", "node:n2", "node:n3", "node:n4"]
    assert found["layout"] == cells["layout"]
    assert states(found) == [OK, OK, NO_DATA, NO_DATA]  # n3 is silent for 5 minutes, n4 never sent anything
    assert numbers(found["ages"]) == [0, 0, 64, 255]
    assert (found["nodes"], found["fleet"], found["simulated"], found["levels"]) == (4, 4, 4, None)


def test_the_cause_and_what_it_affects_have_different_looks(client: httpx.Client, open_incident: Open) -> None:
    open_incident("A1", "gpu:n1.0", members=("gpu:n1.0", "gpu:n2.0"))
    found = fleet_map(client)
    assert states(found) == [CRITICAL, CRITICAL | AFFECTED, NO_DATA, NO_DATA]
    assert found["counts"] == {
        "ok": 0,
        "watch": 0,
        "degraded": 0,
        "critical": 1,
        "no_data": 2,
        "affected": 1,
        "drained": 0,
    }
    assert found["incident_sets"] == [["A1"]]
    assert numbers(found["incident_of"]) == [1, 1, 0, 0]


def test_the_counts_of_an_hour_before_are_those_of_the_incidents_of_then(
    client: httpx.Client, open_incident: Open, backend: StoreBackend
) -> None:
    open_incident("A1", "gpu:n1.0", members=("gpu:n1.0", "gpu:n2.0"))  # 10 minutes ago
    now = backend.clock()
    for number, cause, ended in (("B2", "gpu:n2.0", 30), ("C3", "gpu:n1.0", 90)):
        open_incident(number, cause, severity="ticket", state="resolved")
        with backend.database.transaction() as connection:
            connection.execute(
                "UPDATE incidents SET opened = make_timestamptz(?), resolved = make_timestamptz(?) WHERE id = ?",
                [now - 7200 * SECOND, now - ended * 60 * SECOND, number],
            )
    found = fleet_map(client)
    assert found["before"]["counts"] == {"critical": 0, "degraded": 1, "watch": 0, "affected": 0, "drained": 0}
    assert 0 <= now - 3600 * SECOND - from_iso(found["before"]["time"]) < 60 * SECOND
    assert (found["counts"]["critical"], found["counts"]["degraded"]) == (1, 0)


@pytest.mark.parametrize(("older", "silent"), [(True, ["n3", "n4"]), (False, ["n4"])], ids=["silent", "new"])
def test_the_counts_of_an_hour_before_have_the_nodes_that_were_silent_then_and_no_new_ones(
    client: httpx.Client, backend: StoreBackend, older: bool, silent: list[str]
) -> None:
    """n3 sends since ten minutes ago: either again, or for the first time. n4 is announced and never sent anything."""
    then = (backend.clock() - 3600 * SECOND) // (60 * SECOND) * 60 * SECOND
    gpus = backend.devices.names("gpu")
    ago = [(name, 30) for name in gpus if "n1" in name or "n2" in name]
    ago += [(name, 3600) for name in gpus if older and "n3" in name]
    with backend.database.transaction() as connection:
        for name, seconds in ago:
            connection.execute(
                "INSERT INTO hot_gpu (time, device, sm_clock) VALUES (make_timestamptz(?), ?, 1000)",
                [then - seconds * SECOND, gpus.index(name)],
            )
    assert fleet_map(client)["before"]["counts"]["no_data"] == len(silent)


def test_the_counts_of_an_hour_before_have_the_nodes_that_were_held_then(
    client: httpx.Client, backend: StoreBackend
) -> None:
    now, minute = backend.clock(), 60 * SECOND
    made = {"requested_by": "ann", "reason": "cable", "mode": "on", "created": now - 7200 * SECOND, "expires": now}
    held = {**made, "state": "verified", "began": now - 100 * minute}
    acts = (
        (Act("ACT-1", "hold", ("node:n1", "node:n2"), **held, released=("node:n1", "node:n2")), now - 5 * minute),
        (Act("ACT-2", "release", ("node:n1",), **held, updated=now - 80 * minute), now - 80 * minute),
        (Act("ACT-3", "release", ("node:n2",), **held, updated=now - 5 * minute), now - 5 * minute),
        (Act("ACT-4", "hold", ("node:n3",), **{**held, "began": now - 30 * minute}), now - 30 * minute),
        (Act("ACT-5", "hold", ("node:n4",), **{**held, "mode": "dry-run"}), now - 30 * minute),
    )
    for act, moment in acts:
        with backend.database.transaction() as connection:
            save_act(connection, act, "ann", "", (), moment)
    found = fleet_map(client)
    assert (found["before"]["counts"]["drained"], found["counts"]["drained"]) == (1, 1)  # n2 then, n3 now


@pytest.mark.slow
def test_a_node_that_an_act_holds_is_drained_beside_its_state(client: httpx.Client, backend: StoreBackend) -> None:
    now = backend.clock()
    made = {"requested_by": "ann", "reason": "cable", "mode": "on", "created": now, "expires": now + 3600 * SECOND}
    acts = (
        Act("ACT-1", "hold", ("node:n2", "node:n3"), **made, state="verified", released=("node:n3",)),
        Act("ACT-2", "hold", ("node:n1",), **made, state="approved"),
    )
    for act in acts:
        with backend.database.transaction() as connection:
            save_act(connection, act, "ann", "", (), now)
    found = fleet_map(client)
    assert [look & DRAINED for look in numbers(found["looks"])] == [0, DRAINED, 0, 0]
    assert (found["counts"]["drained"], found["counts"]["ok"]) == (1, 2)


def test_a_coolant_unit_as_cause_makes_its_nodes_affected_and_silent_ones_stay_unknown(
    client: httpx.Client, open_incident: Open
) -> None:
    open_incident("A1", "cdu:c1")
    open_incident("B2", "cdu:c2")
    found = fleet_map(client)
    assert states(found) == [CRITICAL | AFFECTED, CRITICAL | AFFECTED, NO_DATA, NO_DATA]
    assert found["causes"] == ["cdu:c1", "cdu:c2"]


def test_a_cause_on_the_node_comes_before_a_worse_fault_elsewhere(client: httpx.Client, open_incident: Open) -> None:
    open_incident("A1", "cdu:c1")
    open_incident("B2", "gpu:n1.0", severity="watch")
    assert states(fleet_map(client))[:2] == [WATCH, CRITICAL | AFFECTED]


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("rack", [["rack:r1", 2], ["rack:r2", 2]]),
        ("loop", [["cdu:c1", 2], ["cdu:c2", 2]]),
        ("leaf", [["leaf:l1", 2], ["", 2]]),
        ("job", [["job:81", 3], ["", 1]]),
        ("rail", [["", 4]]),
    ],
)
def test_nodes_are_grouped_by_place_or_job(client: httpx.Client, by: str, groups: list[list[object]]) -> None:
    found = layout(client, f"by={by}")
    assert found["groups"] == groups
    assert len(numbers(fleet_map(client, f"by={by}")["looks"])) == 4


def test_a_node_on_two_rails_has_two_cells() -> None:
    topology = Topology(
        {
            "node:n1": ("rack:r1",),
            **{f"port:n1.{i}": ("node:n1", f"leaf:l{i}", f"rail:{i}") for i in range(2)},
        }
    )
    index = FleetGroups().index([("node:n1", True)])
    assert find_pairs(index, topology, {}, "rail") == (("rail:0", 0), ("rail:1", 0))


def test_within_narrows_the_map_and_its_counts(client: httpx.Client) -> None:
    assert layout(client, "within=rack:r2")["names"] == ["node:n3", "node:n4"]
    found = fleet_map(client, "within=rack:r2")
    assert (found["nodes"], found["fleet"], found["counts"]["no_data"]) == (2, 4, 2)
    assert layout(client, "within=leaf:l1")["names"] == ["node:n1", "node:n3"]
    assert layout(client, "within=job:81")["names"] == ["node:n1", "node:n2", "node:n3"]
    assert layout(client, "within=rack:none")["names"] == []


def test_a_layout_is_kept_until_the_topology_changes(client: httpx.Client, backend: StoreBackend) -> None:
    before = layout(client)["layout"]
    assert layout(client)["layout"] == before
    backend.topology.merge({"node:n4": ("rack:r1",)})
    changed = layout(client)
    assert changed["groups"] == [["rack:r1", 3], ["rack:r2", 1]]
    assert changed["layout"] != before


def test_a_wrong_grouping_or_colour_is_refused(client: httpx.Client) -> None:
    for query in ("by=shoe", "colour=mood", "within=rack"):
        assert client.get(f"/api/v1/fleet/map?{query}").status_code == 400


@pytest.mark.parametrize("colour", ["temperature", "power", "ber", "step"])
def test_a_node_without_a_value_has_no_level(client: httpx.Client, colour: str) -> None:
    found = fleet_map(client, f"colour={colour}")
    assert numbers(found["levels"]) == [UNKNOWN] * 4
    assert found["missing"] == 4
    assert found["scale"]["low"] < found["scale"]["high"]


def test_a_deviation_is_from_the_median_of_the_group_and_needs_peers() -> None:
    signal = CATALOGUE["gpu.temperature"]
    values = np.array([50, 52, 70, 51, 40, 40], "f4")
    found = DeviceValues(signal, values, np.array([True, True, True, True, True, False]))
    groups = np.array([0, 0, 0, 0, 1, -1])
    absolute = deviations(found, groups, relative=False)
    assert absolute[:4].tolist() == [-1.5, 0.5, 18.5, -0.5]
    assert np.isnan(absolute[4:]).all()  # alone in its group; without a value
    assert deviations(found, groups, relative=True)[2] == pytest.approx(100 * 18.5 / 51.5)


def test_levels_end_at_the_ends_of_their_scale() -> None:
    kelvin = quantize(np.array([-99, -15, 0, 15, 99, np.nan]), SCALES["temperature"])
    assert kelvin.tolist() == [0, 0, 125, 250, 250, UNKNOWN]
    rates = quantize(np.array([0.0, 1e-15, 10**-10.5, 1e-6]), SCALES["ber"])
    assert rates.tolist() == [0, 0, 125, 250]


def test_an_age_is_one_byte() -> None:
    seconds = [0, 29, 30, 59, 60, 3599, 3600, 7200, 10**6]
    seen = np.array([1000 * SECOND - s * SECOND for s in seconds])
    shifted = seen + 10**7 * SECOND
    assert ages_of(shifted, 1000 * SECOND + 10**7 * SECOND).tolist() == [0, 0, 30, 59, 60, 118, 120, 121, 254]
    assert ages_of(np.array([-1]), 5 * SECOND).tolist() == [255]


# --- what do these share? ---------------------------------------------------------------------------------------------


def fleet_of(racks: int, per_rack: int) -> Topology:
    parents: dict[str, tuple[str, ...]] = {}
    for number in range(racks * per_rack):
        parents[f"node:n{number}"] = (f"rack:x{number // per_rack}",)
        parents[f"port:n{number}.0"] = (f"node:n{number}", f"leaf:l{number % 8}")
    return Topology(parents)


def test_what_separates_a_selection_is_first_with_its_numbers(client: httpx.Client, backend: StoreBackend) -> None:
    backend.topology.merge(fleet_of(16, 16).parents)
    with backend.database.transaction() as connection:
        connection.execute(
            "INSERT INTO entity (entity, kind, site, simulated, parents, attributes) "
            "SELECT 'node:n' || i, 'node', 'local', true, ['rack:x' || (i // 16)], '{}' FROM range(5, 256) r(i)"
        )
    found = share(client, entities=["node:n35", "node:n38", "node:n41", "node:n44", "node:n47"])
    first = found["shared"][0]
    assert (first["attribute"], first["value"], first["inside"], first["outside"]) == ("rack", "rack:x2", 5, 11)
    assert first["separates"]
    assert first["p_corrected"] == pytest.approx(first["p"] * found["compared"])
    assert [row["value"] for row in found["shared"] if row["separates"]] == ["rack:x2"]
    whole = share(client, entities=["leaf:l3"])
    assert whole["selected"] == 32
    assert whole["shared"][0]["value"] == "leaf:l3"


def test_nothing_separates_a_small_or_random_selection(client: httpx.Client) -> None:
    found = share(client, entities=["node:n1", "node:n2", "rack:none"])
    assert found["unknown"] == ["rack:none"]
    assert not any(row["separates"] for row in found["shared"])
    assert found["shared"][0]["value"] in ("rack:r1", "cdu:c1")  # the nearest ones, said to prove nothing


def test_the_nodes_of_an_incident_are_a_selection(client: httpx.Client, open_incident: Open) -> None:
    open_incident("A1", "cdu:c1", state="resolved")
    assert share(client, incident="A1")["selected"] == 2
    assert client.post("/api/v1/share", json={"incident": "none"}).status_code == 404
    answer = client.post("/api/v1/share", json={})
    assert (answer.status_code, "entities, incident" in answer.text) == (400, True)


def test_versions_and_recent_changes_are_compared(client: httpx.Client, backend: StoreBackend, now: int) -> None:
    facts = {
        f"gpu:n{n}.{i}": {"vbios": "96.0" if n < 3 else "95.9", "serial": f"{n}{i}"} for n in (1, 2, 3) for i in (0, 1)
    }
    backend.topology.merge({}, facts)
    with backend.database.transaction() as connection:
        for node in ("n1", "n2"):
            connection.execute(
                "INSERT INTO events SELECT make_timestamptz(?), ?, 'version', ?, 'local', ?, true, NULL",
                [now - SECOND, f"node:{node}", '{"versions": {"driver": "560"}, "before": {"driver": "550"}}', node],
            )
    found = {(r["attribute"], r["value"]): r for r in share(client, entities=["node:n1", "node:n2"])["shared"]}
    vbios, change = found["GPU vbios", "96.0"], found["change in 24 h", "driver: 550 → 560"]
    assert (vbios["inside"], vbios["outside"], change["inside"], change["outside"]) == (2, 0, 2, 0)
    assert not any(attribute == "GPU serial" for attribute, _ in found)


def test_the_tail_of_the_distribution_is_exact() -> None:
    tail = _HypergeometricTail(20, 5)
    exact = sum(math.comb(6, k) * math.comb(14, 5 - k) for k in (3, 4, 5)) / math.comb(20, 5)
    assert tail.probability(3, 6) == pytest.approx(exact)
    assert tail.probability(0, 6) == pytest.approx(1.0)


@pytest.mark.slow
def test_random_selections_are_separated_by_chance_less_often_than_promised() -> None:
    random = np.random.default_rng(7)
    pairs = [(node, (f"attribute {a}", str(random.integers(8)))) for node in range(400) for a in range(10)]
    attributes, everyone = make_attributes(pairs), np.ones(400, bool)
    wrong = 0
    for _ in range(300):
        selected = np.zeros(400, bool)
        selected[random.choice(400, 20, replace=False)] = True
        wrong += any(row["separates"] for row in compare_shares([attributes], selected, everyone)["shared"])
    assert wrong <= 8  # 1 % of 300 is 3; more than 8 has a probability of 0.4 %
