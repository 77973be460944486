"""Output of the management tools, line by line: complete, damaged, hostile and arbitrary."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.fabric.tool_output import (
    ALL_PORTS,
    COUNTERS_BY_TOOL_NAME,
    ERROR_COUNTERS,
    THRESHOLD_FILE,
    TRAFFIC_COUNTERS,
    SwitchPort,
    find_leaves,
    format_guid,
    parse_counts,
    parse_link_line,
    parse_links,
    parse_switches,
)
from pipeline.model.switch_names import switch_name_of, unique_switch_names

UP = (
    '0xb0cf0e0300d51a40 "     MF0;leaf-r07-2:MQM9790/U1"     34   12[  ] ==( 4X       106.25 Gbps Active/  LinkUp)==>  '
    '0x9c63c00300a1b2c3    711    1[  ] "n042 mlx5_3" ( )'
)
DOWN = (
    '0xb0cf0e0300d51a40 "     MF0;leaf-r07-2:MQM9790/U1"     34   13[  ] ==(                Down/ Polling)==>     '
    '        [  ] "" ( )'
)


def link(line: str) -> SwitchPort:
    found = parse_link_line(line)
    assert found is not None
    return found


def test_a_link_that_is_up_has_state_speed_and_peer() -> None:
    found = link(UP)
    assert (found.guid, found.port, found.lid) == ("b0cf:0e03:00d5:1a40", 12, 34)
    assert found.description == "MF0;leaf-r07-2:MQM9790/U1"
    assert (found.logical, found.physical, found.width, found.speed) == (4, 5, 4, 400_000)
    assert found.peer is not None
    assert (found.peer.guid, found.peer.lid, found.peer.port) == ("9c63:c003:00a1:b2c3", 711, 1)
    assert found.peer.description == "n042 mlx5_3"


def test_a_link_that_is_down_has_no_speed_and_no_peer() -> None:
    found = link(DOWN)
    assert (found.port, found.logical, found.physical, found.peer) == (13, 1, 2, None)
    assert math.isnan(found.speed)
    assert math.isnan(found.width)


@pytest.mark.parametrize(
    ("width_and_speed", "width", "speed"),
    [
        ("4X           2.5 Gbps", 4, 10_000),
        ("4X          10.0 Gbps", 4, 40_000),
        ("4X              FDR10", 4, 40_000),
        ("4X  10.0 Gbps (FDR10)", 4, 40_000),
        ("4X       14.0625 Gbps", 4, 56_000),
        ("4X      25.78125 Gbps", 4, 100_000),
        ("2X        53.125 Gbps", 2, 100_000),
        ("1X        106.25 Gbps", 1, 100_000),
        ("4X         212.5 Gbps", 4, 800_000),
        ("4X         999.9 Gbps", 4, math.nan),
    ],
)
def test_speed_is_that_of_the_kernel(width_and_speed: str, width: float, speed: float) -> None:
    found = link(UP.replace("4X       106.25 Gbps", width_and_speed))
    assert found.width == width
    assert found.speed == speed or (math.isnan(found.speed) and math.isnan(speed))


@pytest.mark.parametrize(
    ("state", "logical", "physical"),
    [
        ("Initialize/  LinkUp", 2, 5),
        ("Init/  LinkUp", 2, 5),
        ("Armed/  LinkUp", 3, 5),
        ("Down/Disabled", 1, 3),
        ("Down/PortConfigurationTraining", 1, 4),
        ("Active/LinkErrorRecovery", 4, 6),
    ],
)
def test_states_are_the_numbers_of_the_specification(state: str, logical: int, physical: int) -> None:
    found = link(UP.replace("Active/  LinkUp", state))
    assert (found.logical, found.physical) == (logical, physical)


@pytest.mark.parametrize(
    "hostile",
    [
        'x" ( )',
        '")==> 0x1 1 1[ ] "y',
        '" 99 1[ ] ==( 4X 106.25 Gbps Active/ LinkUp)==> 0xffff 9 9[  ] "z',
        "\x1b[31m",
        '"' * 60,
        "ä" * 64,
    ],
)
def test_a_hostile_peer_description_corrupts_only_itself(hostile: str) -> None:
    found, plain = link(UP.replace("n042 mlx5_3", hostile)), link(UP)
    assert (found.key, found.logical, found.speed) == (plain.key, plain.logical, plain.speed)
    assert found.peer is not None
    assert plain.peer is not None
    assert (found.peer.guid, found.peer.port) == (plain.peer.guid, plain.peer.port)
    assert found.peer.description.isprintable()
    assert len(found.peer.description) <= 64


def test_the_first_of_two_lines_of_one_port_counts_and_port_0_is_not_a_link() -> None:
    other = UP.replace("Active/  LinkUp", "Armed/  LinkUp")
    port0 = UP.replace("   12[", "    0[")
    (found,) = parse_links("\n".join([port0, UP, other, UP, "", "Switch: something", UP[:80]])).values()
    assert found.logical == 4


def test_unchanged_lines_are_not_parsed_again() -> None:
    known = parse_links(UP)
    assert parse_links(f"{UP}\n{DOWN}", known)[UP] is known[UP]


LINE = st.text(max_size=200) | st.builds(
    lambda a, b, c: a[:b] + c + a[b:], st.sampled_from([UP, DOWN]), st.integers(0, 230), st.text(max_size=20)
)


@given(st.lists(LINE, max_size=6).map("\n".join))
def test_any_text_is_parsed_to_valid_ports_or_nothing(text: str) -> None:
    for found in parse_links(text).values():
        assert 0 < found.port < 1000
        assert len(found.description) <= 64
        assert found.speed >= 0 or math.isnan(found.speed)
    parse_switches(text)
    parse_counts(text, text)


# --- counters --------------------------------------------------------------------------------------------------------

PASS = """Errors for 0xb0cf0e0300d51a40 "MF0;leaf-r07-2:MQM9790/U1"
   GUID 0xb0cf0e0300d51a40 port ALL: [SymbolErrorCounter == 12] [LinkDownedCounter == 3] [PortXmitWait == 4401]
   GUID 0xb0cf0e0300d51a40 port 12: [SymbolErrorCounter == 12] [PortXmitWait == 4401]
   GUID 0xb0cf0e0300d51a40 port 13: [LinkDownedCounter == 3]

## Summary: 9 nodes checked, 1 bad nodes found
##          310 ports checked, 2 ports have errors beyond threshold
## Thresholds: [SymbolErrorCounter = 0]
## Suppressed:
"""
DATA = """Data Counters for 0xb0cf0e0300d51a40 "MF0;leaf-r07-2:MQM9790/U1"
   GUID 0xb0cf0e0300d51a40 port 12: [PortXmitData == 18446744073709551615 (64.0EB)] [PortRcvData == 71 (284.000B)] """


def test_counters_are_integers_per_port_without_the_sum_of_all_ports() -> None:
    found = parse_counts(PASS)
    place = "b0cf:0e03:00d5:1a40"
    assert found.complete
    assert found.values == {
        (place, 12): {"SymbolErrorCounter": 12, "PortXmitWait": 4401},
        (place, 13): {"LinkDownedCounter": 3},
    }
    assert parse_counts(DATA).values[place, 12] == {"PortXmitData": 2**64 - 1, "PortRcvData": 71}


def test_omitted_counters_are_zero_only_for_ports_that_responded() -> None:
    talk = (
        "ibwarn: [7] mad_rpc: _do_madrpc failed; dport (Lid 40)\n"
        "ibwarn: [7] print_errors: query failed on leaf, Lid 40, odd Lid 9 port 1 name, Lid 40 port 2\n"
        f"ibwarn: [7] print_errors: query failed on leaf, Lid 41 port {ALL_PORTS}\n"
    )
    found = parse_counts(PASS + "##          2 PMA query failures\n", talk)
    assert found.complete
    assert found.answered(34, 12)
    assert found.answered(40, 1)
    assert not found.answered(40, 2)
    assert not found.answered(41, 7)


@pytest.mark.parametrize(
    ("text", "talk", "cut"),
    [
        ("", "", False),
        (PASS[: PASS.index("## Summary")], "", False),
        (PASS + "##          5 PMA query failures\n", "query failed on leaf, Lid 40 port 2", False),
        (PASS, "", True),
    ],
)
def test_an_incomplete_run_implies_no_zeros(text: str, talk: str, cut: bool) -> None:
    assert not parse_counts(text, talk, cut).answered(34, 12)


def test_every_counter_has_the_signal_of_the_nodes_own_port_and_every_error_a_threshold_of_zero() -> None:
    assert COUNTERS_BY_TOOL_NAME["SymbolErrorCounter"].signal == "nic.symbol_errors"
    assert (COUNTERS_BY_TOOL_NAME["PortXmitData"].signal, COUNTERS_BY_TOOL_NAME["PortXmitData"].scale) == (
        "nic.tx_bytes",
        4,
    )
    assert len(ERROR_COUNTERS) + len(TRAFFIC_COUNTERS) == len(COUNTERS_BY_TOOL_NAME)
    assert THRESHOLD_FILE.splitlines() == [f"{name}=0" for name in ERROR_COUNTERS]


# --- switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("MF0;leaf-r07-2:MQM9790/U1", "leaf-r07-2"),
        ("MF0;core:CS7500/L05/U1", "core-L05-U1"),
        ("Quantum Mellanox Technologies", "Quantum_Mellanox_Technologies"),
        ("sw1.row2.example", "sw1.row2.example"),
        ("../../etc/passwd", "etc_passwd"),
        ("a:b;c'\"", "a_b_c"),
        ("  ", ""),
        ("x" * 64, "x" * 48),
    ],
)
def test_a_description_becomes_a_valid_entity_name(description: str, name: str) -> None:
    assert switch_name_of(description) == name


def test_switches_without_a_unique_name_are_named_by_guid() -> None:
    descriptions = {"0000:0000:0000:000a": "same", "0000:0000:0000:000b": "same", "0000:0000:0000:000c": ""}
    alone = {"0000:0000:0000:000d": "leaf", "0000:0000:0000:000e": "000000000000000a"}
    assert unique_switch_names({**descriptions, **alone}) == {
        "0000:0000:0000:000a": "000000000000000a",
        "0000:0000:0000:000b": "000000000000000b",
        "0000:0000:0000:000c": "000000000000000c",
        "0000:0000:0000:000d": "leaf",
        "0000:0000:0000:000e": "000000000000000e",
    }


@given(st.dictionaries(st.integers(0, 50).map(lambda n: format_guid(f"{n:x}")), st.text(max_size=70), max_size=8))
def test_any_descriptions_give_unique_switch_names(descriptions: dict[str, str]) -> None:
    found = unique_switch_names(descriptions)
    assert found.keys() == descriptions.keys()
    assert len(set(found.values())) == len(found)
    assert all(0 < len(name) <= 48 and ":" not in name for name in found.values())


def test_a_leaf_has_hosts_and_the_switchs_own_engine_is_not_a_host() -> None:
    spine = UP.replace("b0cf0e0300d51a40", "aa").replace("n042 mlx5_3", "Mellanox Technologies Aggregation Node")
    assert find_leaves([link(UP), link(spine)]) == {"b0cf:0e03:00d5:1a40"}


def test_the_topology_describes_the_switches() -> None:
    text = """
vendid=0x2c9
devid=0xd2f2
sysimgguid=0xb0cf0e0300d51a40
switchguid=0xb0cf0e0300d51a40(b0cf0e0300d51a40)
Switch\t65 "S-b0cf0e0300d51a40"\t\t# "MF0;leaf" enhanced port 0 lid 34 lmc 0
[1]\t"H-9c63c00300a1b2c3"[1](9c63c00300a1b2c3) \t\t# "n042 mlx5_3" lid 711 4xNDR

vendid=0x2c9
devid=0x1021
caguid=0x9c63c00300a1b2c3
Ca\t1 "H-9c63c00300a1b2c3"\t\t# "n042 mlx5_3"
"""
    (facts,) = parse_switches(text).values()
    assert (facts.ports, facts.vendor, facts.device, facts.system_guid) == (65, "2c9", "d2f2", "b0cf:0e03:00d5:1a40")
