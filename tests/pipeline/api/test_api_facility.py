"""GET /api/v1/facility: values and state of cooling and power units, what depends on them, and predicted throttling."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.api.facility.prediction import Margin, fit_rate, predict
from pipeline.api.facility.routes import Facility
from pipeline.api.facility.units import find_below
from pipeline.model.signals.signal import HEALTH
from pipeline.model.topology import Topology
from tests.pipeline.api.conftest import CLOCKS, NOW, StoreBackend
from tests.pipeline.api.test_api_quality import add_device


def units_of(client, **query: str) -> dict[str, dict[str, Any]]:
    found = client.get("/api/v1/facility", params=query).json()
    Facility.model_validate(found)
    return {unit["entity"]: unit for unit in found["units"]}


def add_heat(backend: StoreBackend, per_minute: float, left: float | None = 6.0) -> None:
    """Ten minutes of temperatures of n1's GPUs that rise, and their margin to the limit now."""
    with backend.database.transaction() as connection:
        connection.execute("DELETE FROM hot_gpu")
        for number, gpu in enumerate(CLOCKS):
            if not gpu.startswith("gpu:n1."):
                continue
            connection.execute(
                """INSERT INTO hot_gpu (time, device, temperature)
                   SELECT make_timestamptz($now - i * 10000000), $number, 80 - i * 10 / 60.0 * $rate
                   FROM range(60) r(i)""",
                {"now": NOW, "number": number, "rate": per_minute},
            )
            connection.execute(
                "UPDATE latest_gpu SET temperature = 80, thermal_margin = ?, slowdown_margin = 0 WHERE device = ?",
                [left, number],
            )


def test_a_unit_has_its_values_and_what_hangs_on_it(client, backend) -> None:
    add_device(backend, "power", 0, "pdu:p1", "row1", draw=105_698.0, breaker=1)
    add_device(backend, "leak", 0, "leak_detector:r1", "row1", state=0)
    found = units_of(client)
    cdu = found["cdu:c1"]
    assert cdu["values"] == {"coolant.flow": 200.0}
    assert cdu["state"] == "ok"
    assert cdu["below"]["racks"] == {"count": 1, "first": ["rack:r1"]}
    assert cdu["below"]["nodes"] == {"count": 2, "first": ["node:n1", "node:n2"]}
    assert cdu["below"]["jobs"] == {"count": 1, "first": ["job:81"]}
    assert found["pdu:p1"]["values"] == {"power.draw": 105_698.0, "power.breaker": "tripped"}
    assert found["pdu:p1"]["abnormal"] == ["power.breaker"]
    assert found["leak_detector:r1"]["abnormal"] == []


def test_a_unit_without_data_is_never_ok(client) -> None:
    assert units_of(client)["cdu:c2"]["state"] == "no_data"  # only the topology names it


def test_the_worst_unit_comes_first_with_its_incidents(client, open_incident) -> None:
    open_incident("B2", "cdu:c1", "ticket")
    open_incident("A1", "cdu:c2", "page")
    assert [(e, u["state"], u["incidents"]) for e, u in units_of(client).items()] == [
        ("cdu:c2", "critical", ["A1"]),
        ("cdu:c1", "degraded", ["B2"]),
    ]


def test_throttling_is_predicted_from_the_margin_and_the_warming_rate(client, backend) -> None:
    add_heat(backend, 0.5)
    found = units_of(client)["cdu:c1"]["throttle"]
    assert found["minutes"] == pytest.approx(12.0, rel=0.03)  # 6 K at 0.5 K/min
    assert (found["left"], found["gpus"], found["reason"]) == (6.0, 2, "")
    assert found["rate"] == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    ("rate", "left", "reason"),
    [
        (0.0, 6.0, "its GPUs do not warm"),
        (-0.5, 6.0, "its GPUs do not warm"),
        (0.11, 170.0, "at this rate not within a day"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(client, backend, rate: float, left: float, reason: str) -> None:
    add_heat(backend, rate, left)
    found = units_of(client)["cdu:c1"]["throttle"]
    assert (found["minutes"], found["reason"]) == (None, reason)


def test_without_a_reported_limit_nothing_is_predicted(client, backend) -> None:
    add_heat(backend, 0.5, None)
    found = units_of(client)["cdu:c1"]["throttle"]
    assert (found["minutes"], found["reason"]) == (None, "the GPUs behind it report no limit (gpu.thermal_margin)")


def test_a_gpu_at_its_limit_has_no_minutes_left() -> None:
    assert predict([Margin("gpu:n1.0", 88.0, -1.0)], {})["minutes"] == 0.0


def predicted(curve: Callable[[float], float], after: float, seed: int = 1, noise: float = 0.5) -> dict[str, Any]:
    """Returns the prediction for 12 GPUs `after` minutes (from 0) of a curve, in readings of 10 s rounded to 1 K."""
    rng, minutes = np.random.default_rng(seed), np.arange(-60, 0) / 6
    truth = np.array([curve(after + minute) for minute in minutes])
    lines = {f"gpu:n1.{i}": (minutes, np.round(truth + rng.normal(0, noise, 60))) for i in range(12)}
    now = float(truth[-1])
    margins = sorted(
        (Margin(gpu, float(line[-1]), 87.0 - now) for gpu, (_, line) in lines.items()), key=lambda m: m.gpu
    )
    return predict(margins, lines)


def test_one_gpu_that_begins_to_work_is_no_warming_of_the_unit() -> None:
    minutes = np.arange(-60, 0) / 6
    lines = {f"gpu:n1.{i}": (minutes, 67.0 + np.arange(60) % 2) for i in range(11)}
    lines["gpu:n2.0"] = minutes, np.where(minutes > -1, 85.0, 60.0)
    margins = [Margin("gpu:n2.0", 85.0, 2.0), *(Margin(f"gpu:n1.{i}", 67.0, 20.0) for i in range(11))]
    assert predict(margins, lines)["reason"] == "its GPUs do not warm"


@pytest.mark.parametrize(("hot", "minutes"), [(1, None), (2, None), (3, 0.0), (12, 0.0)])
def test_one_gpu_at_its_limit_is_its_own_fault_and_several_are_the_units(hot: int, minutes: float | None) -> None:
    times = np.arange(-60, 0) / 6
    margins = [Margin(f"gpu:n{i}.0", 87.0 if i < hot else 67.0, 0.0 if i < hot else 20.0) for i in range(12)]
    found = predict(margins, {m.gpu: (times, 0 * times + m.temperature) for m in margins})
    assert found["minutes"] == minutes


def test_noise_is_no_warming() -> None:
    found = [predicted(lambda minute: 80.0, 0.0, seed)["minutes"] for seed in range(200)]
    assert sum(minutes is not None for minutes in found) <= 2  # of 200: three standard errors, one-sided


def test_a_pump_that_loses_speed_is_predicted_within_two_minutes_of_warming() -> None:
    def curve(minute: float) -> float:
        return 67.0 + 5.0 * max(0.0, minute)  # at its limit after 4 min

    for after in (1.5, 2.0, 3.0):
        assert predicted(curve, after)["minutes"] == pytest.approx(4.0 - after, rel=0.7)
    assert predicted(curve, 0.0)["minutes"] is None


def test_gpus_that_are_warmer_since_minutes_but_warm_no_more_are_not_predicted_to_throttle() -> None:
    """The line over 10 minutes rose by 3 K/min for eight minutes after a step, which was shown as one minute left."""

    def curve(minute: float) -> float:
        return 67.0 if minute < 0 else 84.0 - 17.0 * math.exp(-minute * 3)

    for after in (3.5, 5.0, 8.0):
        found = predicted(curve, after)
        assert (found["minutes"], found["reason"]) == (None, "its GPUs do not warm")


@pytest.mark.parametrize("after", [20, 40, 60, 90, 120, 180, 300])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gpus_that_cooled_for_a_checkpoint_and_become_as_warm_as_before_do_not_warm(after: int, seed: int) -> None:
    def curve(minute: float) -> float:
        """As the demo's GPUs: 14 K less within 40 s of a checkpoint of 50 s, and back in 30 s after its end at 0."""
        share = np.clip((minute * 60 + 50) / 40, 0, 1) if minute < 0 else 1 - np.clip(minute * 2, 0, 1)
        return float(56.0 - 14.0 * share)

    assert predicted(curve, after / 60, seed)["reason"] == "its GPUs do not warm"


def test_slow_warming_of_the_room_is_predicted() -> None:
    found = predicted(lambda minute: 80.0 + 0.2 * minute, 0.0)
    assert found["rate"] == pytest.approx(0.2, rel=0.3)
    assert found["minutes"] == pytest.approx(35.0, rel=0.35)


def test_a_gpu_that_is_hot_by_its_own_fault_and_does_not_warm_is_not_the_first() -> None:
    minutes = np.arange(-60, 0) / 6
    lines = {f"gpu:n1.{i}": (minutes, 70.0 + 0.3 * minutes) for i in range(11)} | {
        "gpu:n2.0": (minutes, 0 * minutes + 85)
    }
    found = predict([Margin("gpu:n2.0", 85.0, 2.0), *(Margin(f"gpu:n1.{i}", 70.0, 17.0) for i in range(11))], lines)
    assert (found["gpu"], found["left"]) == ("gpu:n1.0", 17.0)
    assert found["minutes"] == pytest.approx(17.0 / 0.3, rel=0.05)


def test_two_points_are_no_line() -> None:
    assert math.isnan(fit_rate(np.arange(2.0), np.arange(2.0))[0])


def test_a_part_of_a_unit_is_listed_with_it(client, backend) -> None:
    backend.topology.merge({"outlet:p1.7": ("pdu:p1",), "pump:c1.1": ("cdu:c1",)})
    add_device(backend, "power", 0, "outlet:p1.7", "row1", state=1)
    assert "outlet:p1.7" not in units_of(client)
    assert set(units_of(client, within="pdu:p1")) == {"pdu:p1", "outlet:p1.7"}
    assert client.get("/api/v1/facility", params={"within": "cdu:<b>"}).status_code == 404
    assert client.get("/api/v1/facility", params={"within": "node:n1"}).status_code == 400


def test_what_hangs_on_the_units_of_a_large_fleet_is_found_quickly() -> None:
    parents = {f"node:n{i}": (f"rack:r{i // 18}",) for i in range(12_500)}
    parents |= {f"rack:r{i}": (f"cdu:c{i // 8}", f"pdu:p{i}") for i in range(700)}
    parents |= {f"gpu:n{i}.{g}": (f"node:n{i}",) for i in range(12_500) for g in range(8)}
    topology = Topology.from_checked(parents)
    begun = time.process_time()
    found = find_below(topology)
    assert (len(found["cdu:c0"].nodes), len(found["pdu:p0"].nodes)) == (144, 18)
    assert time.process_time() - begun < 2.0


def balance_of(client, **query: str) -> dict[str, Any]:
    return {name: unit["balance"] for name, unit in units_of(client, **query).items()}


def test_the_phases_of_a_pdu_are_those_of_its_worst_circuit(client, backend) -> None:
    backend.topology.parents["circuit:p1.m1"] = backend.topology.parents["circuit:p1.m2"] = ("pdu:p1",)
    add_device(backend, "power", 0, "pdu:p1", "row1", draw=9000.0)
    lines = {"current_line1": 30.0, "current_line2": 20.0, "current_line3": 10.0}
    add_device(backend, "power", 1, "circuit:p1.m1", "row1", **lines)
    add_device(backend, "power", 2, "circuit:p1.m2", "row1", current_unbalance=0.07)
    add_device(backend, "power", 3, "pdu:p2", "row1", current_line1=30.0, current_line2=20.0)
    wanted = {"phases": 0.5, "circuit": "circuit:p1.m1", "share": None, "feeds": 1}
    found = balance_of(client)
    assert found["pdu:p1"] == wanted
    assert found["pdu:p2"] is None  # the third line is not read


def test_pdus_that_supply_the_same_racks_have_shares_of_their_power(client, backend) -> None:
    backend.topology.parents["rack:r1"] = (*backend.topology.parents.get("rack:r1", ()), "pdu:a", "pdu:b")
    add_device(backend, "power", 0, "pdu:a", "row1", draw=6000.0)
    add_device(backend, "power", 1, "pdu:b", "row1", draw=2000.0)
    shares = {name: row["share"] for name, row in balance_of(client).items() if row}
    assert shares == {"pdu:a": 0.75, "pdu:b": 0.25}


def test_a_feed_without_data_leaves_the_share_unknown(client, backend) -> None:
    backend.topology.parents["rack:r1"] = (*backend.topology.parents.get("rack:r1", ()), "pdu:a", "pdu:b")
    add_device(backend, "power", 0, "pdu:a", "row1", draw=6000.0)
    assert balance_of(client)["pdu:a"] is None


def test_supplies_that_share_unevenly_are_found_and_spares_do_not_count(client, backend) -> None:
    loads = {"n1": (1500.0, 1500.0, 0.0, 0.0), "n2": (900.0, 1000.0, 1000.0, 0.0)}
    lost, standby = HEALTH.index("critical"), HEALTH.index("standby")
    states = {"n1": (0, 0, lost, standby), "n2": (0, 0, 0, standby)}
    for number, (node, supply) in enumerate((node, i) for node in loads for i in range(4)):
        backend.topology.parents[f"psu:{node}.{supply}"] = (f"node:{node}",)
        own = {"output_power": loads[node][supply], "status": states[node][supply]}
        add_device(backend, "psu", number, f"psu:{node}.{supply}", node, **own)
    found = client.get("/api/v1/facility").json()["supplies"]
    assert (found["nodes"], found["uneven"], found["limit"]) == (2, 1, 0.2)
    wanted = {"psu:n1.0": 1500.0, "psu:n1.1": 1500.0, "psu:n1.2": 0.0}
    assert found["worst"] == [{"node": "node:n1", "supply": "psu:n1.0", "excess": 0.5, "loads": wanted}]


def test_no_supplies_are_no_even_ones(client) -> None:
    assert client.get("/api/v1/facility").json()["supplies"]["nodes"] == 0
