"""The page of a link: both ends, optics, errors as rates, flaps and neighbours; an end without monitoring is named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dashboards.devices.answers import EventItem, EventItems, parse_comparison, parse_entity, parse_values
from dashboards.devices.happened import rows
from dashboards.link.ends import Ends, count_flaps, marks
from dashboards.link.page import error_table, state_badge
from dashboards.link.signals import BER, ERRORS, LEVELS, convert_to_hours, with_bit_error_rate
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE
from tests.dashboards.conftest import NOW, incident_table
from tests.dashboards.device_tables import compare_table, empty_caches, entity_table, serve_node, values_table
from tests.dashboards.test_dashboard_pages import page, shown

PORT = "port:n003.mlx5_0"


def link_script() -> None:
    from dashboards.link import page

    page.page()


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    empty_caches()


def test_all_signals_of_the_page_exist() -> None:
    asked = [name for one in (*LEVELS.values(), *(s for many in ERRORS.values() for s in many)) for name in one]
    assert set(asked) <= CATALOGUE.keys()
    assert all(len(one) <= 8 for one in (*LEVELS.values(), *(s for many in ERRORS.values() for s in many)))


@pytest.mark.slow
def test_a_far_end_that_is_not_monitored_is_said(api: Any) -> None:
    serve_node(api)
    text = shown(page(link_script, entity=PORT, live="0"))
    for expected in (
        "Port mlx5_0 of n003",
        "STATE UNKNOWN",  # the newest row is months old
        "Far end not monitored.",
        "leaf switch l1</a>",
        "MT1",
        "Error counters",
        "Neighbours on the same leaf switch",
        "not read: the collector ethtool reads it",
    ):
        assert expected in text


def test_the_state_is_known_for_a_minute() -> None:
    values = parse_values(values_table(PORT, ["nic.state"], "node:n003", 0))
    assert ">UP<" in state_badge(values, PORT, NOW + 60 * SECOND)
    assert "UNKNOWN" in state_badge(values, PORT, NOW + 61 * SECOND)
    assert "UNKNOWN" in state_badge(None, PORT, NOW)
    down = values_table(PORT, ["nic.state"], "node:n003", 0)
    down["classes"][1]["signals"][0]["values"] = [0.0]
    assert "fp-tone-critical" in state_badge(parse_values(down), PORT, NOW)


def test_both_ends_are_shown_if_both_are_known(api: Any) -> None:
    serve_node(api)
    peer = "port:sw1.7"

    def entity(query: dict[str, list[str]]) -> Any:
        if query["entity"][0] == peer:
            return {**(entity_table(PORT, "node:n003", 8) or {}), "entity": peer, "attributes": {"serial": "SW-1"}}
        return {**(entity_table(PORT, "node:n003", 8) or {}), "links": {PORT: peer}}

    api.tables["entity"] = entity
    text = shown(page(link_script, entity=PORT, live="0"))
    assert "Port mlx5_0 of n003 to port 7 of sw1" in text
    assert "SW-1" in text
    assert "Far end not monitored" not in text
    asked = [query["entity"] for path, query in api.asked if path == "compare"]
    assert asked
    assert all(one == [PORT, peer] for one in asked)


PEER = "port:sw1.7"


def serve_both_ends(api: Any) -> None:
    """Lets the API answer about a port and its peer, at which the errors, an incident and the flaps are."""
    serve_node(api)
    table = entity_table(PORT, "node:n003", 8) or {}
    there = {
        **incident_table("P1", cause=PEER, entity=PEER, summary="Port 7 of sw1: symbol errors"),
        "relation": "cause",
    }
    past = {**incident_table("P0", state="resolved", resolved=iso(NOW)), "relation": "member"}
    api.tables["entity"] = lambda query: (
        {**table, "entity": PEER, "incidents": [there, past]}
        if query["entity"][0] == PEER
        else {**table, "incidents": [], "links": {PORT: PEER}}
    )
    down = {"from": "up", "to": "down", "state": "down"}
    api.tables["events"] = lambda query: {
        "items": [
            {"time": iso(NOW - i * SECOND), "type": "event", "entity": PEER, "subject": "link_state", "data": down}
            for i in range(2)
        ]
        if query["entity"][0] == PEER
        else [],
        "truncated": False,
    }


def test_what_the_far_end_counted_and_had_is_on_the_page(api: Any) -> None:
    serve_both_ends(api)
    text = shown(page(link_script, entity=PORT, live="0"))
    assert "Far end: suspected cause of an unresolved incident." in text
    assert "Port 7 of sw1: symbol errors" in text
    assert "this end 0 flaps, far end 2 flaps" in text
    counters, _, rest = text.partition("Error counters")[2].partition("History")
    assert counters.count("entity=port%3Asw1.7") == counters.count("entity=port%3An003.mlx5_0") > 3
    assert ">End</th>" in counters
    events, _, incidents = rest.partition("Past incidents")
    assert events.count("up → down") == 2
    assert "far end: has findings of" in incidents


def test_marks_of_the_far_end_say_so_and_common_ones_are_once(api: Any) -> None:
    serve_both_ends(api)
    far = parse_entity(api.tables["entity"]({"entity": [PEER]}))
    both = Ends(far, far, None)
    assert far_marks(both) == []
    here = replace(far, entity=PORT, incidents=())
    assert far_marks(Ends(here, far, None)) == ["Far end: Port 7 of sw1: symbol errors"]


def far_marks(both: Ends) -> list[str]:
    return [mark.text for mark in marks(both, NOW) if mark.text.startswith("Far end: Port")]


@pytest.mark.parametrize("asked", ["", "gpu:n1.0", "port:"])
def test_an_address_without_a_port_says_what_is_expected(api: Any, asked: str) -> None:
    assert "Expected a port or NVLink in the address" in shown(page(link_script, entity=asked))


@pytest.mark.slow
def test_an_unknown_port_is_not_found(api: Any) -> None:
    assert "is not known." in shown(page(link_script, entity="port:n9.x"))


def test_the_bit_error_rate_is_corrected_bits_per_bit() -> None:
    names = ["nic.phy_corrected_bits", "nic.phy_bits", "nic.symbol_errors"]
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": [PORT], "signal": names}
    found = parse_comparison(compare_table(query, "node:n003", 8))
    found.signals[1].lines[0].values[:] = np.float32(6e9)
    found.signals[1].lines[0].values[0] = 0  # nothing received: no rate, not an infinite one
    made = with_bit_error_rate(found)
    assert [signal.name for signal in made.signals] == [BER, "nic.symbol_errors"]
    rate = made.signals[0].lines[0].values
    assert np.isnan(rate[0])
    assert rate[1] == pytest.approx(1e-8)


def test_all_rates_of_a_row_of_error_counters_are_per_hour() -> None:
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": [PORT], "signal": ["nic.symbol_errors"]}
    found = parse_comparison(compare_table(query, "node:n003", 8))
    values = found.signals[0].lines[0].values
    values[:] = np.float32(0.0)
    values[: len(values) // 2] = np.float32(0.5)
    text = error_table(list(found.signals), [PORT])
    assert re.findall(r"<th[^>]*>([^<]*)</th>", text) == [
        "Counter", "Mean per hour", "Highest per hour", "Peers per hour",
    ]  # fmt: skip
    assert ">900<" in text
    assert ">1,800<" in text
    assert "/s" not in text


def test_counters_that_could_not_be_read_are_unknown_and_not_without_errors(api: Any) -> None:
    serve_node(api)
    answer = api.tables["compare"]
    api.tables["compare"] = lambda query: answer(query) if query["signal"][0] in LEVELS["port"] else None
    text = shown(page(link_script, entity=PORT, live="0"))
    assert "Error counters" in text
    assert "No errors counted" not in text
    assert "Errors unknown." in text
    assert "Could not be read, so not known: symbol errors, carrier downs" in text
    assert "No error counter was read." in error_table([], [PORT])


def test_counters_that_fail_later_are_the_last_known_ones(api: Any) -> None:
    serve_node(api)
    answer = api.tables["compare"]

    def compare(query: dict[str, list[str]]) -> Any:
        found = answer(query)
        for signal in found["signals"] if query["signal"][0] not in LEVELS["port"] else ():
            signal["lines"][0]["values"] = [0.0] * 60
        return found

    api.tables["compare"] = compare
    assert ">No errors counted." in shown(page(link_script, entity=PORT, live="0"))
    api.broken["compare"] = (503, b"{}")
    empty_caches()
    assert ">No errors counted." not in (text := shown(page(link_script, entity=PORT, live="0")))
    assert "Last known: no errors counted." in text


def test_one_answer_of_two_leaves_the_other_counters_unknown() -> None:
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": [PORT], "signal": ["nic.symbol_errors"]}
    found = parse_comparison(compare_table(query, "node:n003", 8))
    found.signals[0].lines[0].values[:] = np.float32(0)
    read, partly = (
        error_table(list(found.signals), [PORT]),
        error_table(list(found.signals), [PORT], ["nic.rx_dropped"]),
    )
    assert "No errors counted." in read
    assert "Without errors: symbol errors." in partly
    assert "No errors counted." not in partly
    assert "Could not be read, so not known: rx dropped." in partly


def test_many_flaps_are_one_row() -> None:
    items = tuple(
        EventItem(NOW - i * SECOND, "event", PORT, "link_state", {"from": "a", "to": "b", "state": s})
        for i, s in enumerate(["up", "down"] * 10)
    )
    assert count_flaps(EventItems(items, False), PORT) == "10 flaps"
    assert count_flaps(EventItems(items, True), PORT) == "10 flaps or more"
    found = rows(items, NOW)
    assert len(found) == 1
    assert "Link: 10 flaps" in found[0][2]
    assert len(rows(items[:4], NOW)) == 4


def test_charts_of_error_counters_are_per_hour_as_their_table() -> None:
    names = ["nic.symbol_errors", "nic.rx_bytes"]
    query = {"from": [iso(NOW - 3600 * SECOND)], "to": [iso(NOW)], "entity": [PORT], "signal": names}
    table = compare_table(query, "node:n003", 8)
    for signal, unit in zip(table["signals"], ("{error}/s", "By/s"), strict=True):
        signal["signal"]["unit"] = unit
    errors, traffic = parse_comparison(table).signals
    made = convert_to_hours(errors)
    assert made.unit == "{error}/h"
    assert made.lines[0].values[0] == errors.lines[0].values[0] * 3600
    assert made.band is not None
    assert made.band[0][0] == 61 * 3600
    assert convert_to_hours(traffic) is traffic
