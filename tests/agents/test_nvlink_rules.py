"""The registers of XID 74 and the numbers of XID 144 to 150: every rule of the data, in both forms of the driver."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.gpu.xid_text import (
    NvlinkUnit,
    UnitRule,
    decode_nvlink_registers,
    decode_unit_status,
    shipped_nvlink_rules,
)

RULES = [(unit, rule) for unit in shipped_nvlink_rules().units for rule in unit.rules]


def line(unit: NvlinkUnit, rule: UnitRule, code: int, name: str | None = None) -> str:
    info = code | rule.reason << 20 | 5 << 13
    return f"{name or unit.name} Nonfatal XC0 i0 Link 05 (0x{info:08x} 0x{rule.status:08x} 0x0 0x0)"


def test_there_are_the_94_rules_of_the_catalogue() -> None:
    actions = [rule.action for _, rule in RULES]
    assert len(RULES) == 94
    assert {action: actions.count(action) for action in actions} == {"reset GPU": 41, "as XID 154 says": 8, "none": 45}
    assert all(rule.severity in ("fatal", "nonfatal") and rule.next_action for _, rule in RULES)
    assert re.fullmatch(r"\d{4}-\d{1,2}-\d+", shipped_nvlink_rules().version)


@pytest.mark.parametrize("driver", [570, 575, None])
def test_each_rule_is_found_by_unit_reason_and_status(driver: int | None) -> None:
    for unit, rule in RULES:
        code = unit.from_575[0] if driver == 575 else unit.before_575[0]
        found = decode_unit_status(unit.xid, line(unit, rule, code), driver)
        assert (found["action"], found["then"], found["rule_severity"]) == (
            rule.action,
            rule.next_action,
            rule.severity,
        )
        assert (found["unit"], found["link"], found["reason"]) == (unit.name, 5, rule.reason)


def test_the_driver_branch_decides_where_the_unit_is() -> None:
    """0x21 is SAW_MVB in bits 9:0 of older drivers; newer ones have it at 0x01 in bits 6:0."""
    text = "NEW_NAME Fatal XC0 i1 Link 03 (0x00000021 0x00000002 0x0)"
    assert decode_unit_status(144, text, 570)["action"] == "reset GPU"
    assert "action" not in decode_unit_status(144, text, 575)
    assert decode_unit_status(144, text.replace("0x00000021", "0x00000001"), 580)["action"] == "reset GPU"


def test_a_link_down_has_its_reason() -> None:
    """Reasons as bits 25:20 carry them."""
    down = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 14 (0x{:08x} 0x00000000 0x0)"
    peer = decode_unit_status(149, down.format(33 << 20 | 14 << 13 | 0x1C6))
    assert (peer["link"], peer["reason"], peer["then"]) == (14, 33, "check the peer device")
    host = decode_unit_status(149, down.format(40 << 20 | 0x1C6))
    assert (host["action"], host["then"]) == ("none", "check the host")


def test_several_status_bits_select_the_most_severe_rule() -> None:
    text = "RLW_SRC_TRACK Fatal XC1 i0 Link 03 (0x000000e2 0x0000001e 0x0)"
    assert decode_unit_status(145, text)["action"] == "reset GPU"


@pytest.mark.parametrize(
    "text", ["", "Placeholder message", "NETIR Fatal XC0 i0 Link -1", "NETIR Fatal XC0 i0 Link -1 (0x000fe406"]
)
def test_a_short_line_has_partial_details(text: str) -> None:
    found = decode_unit_status(149, text)
    assert "action" not in found
    assert found.get("link", -1) == -1


def test_register_bits_of_xid_74_are_named_and_the_highest_rank_decides() -> None:
    text = "NVLink: fatal error detected on link 14(0x{:x}, 0x0, 0x{:x}, 0x{:x}, 0x{:x}, 0x0, 0x0)"
    seen = decode_nvlink_registers(text.format(1 << 4, 0, 1 << 18, 0))
    assert (seen["link"], seen["verdict"], seen["repeats"]) == (14, "ECC or parity", 3)
    assert seen["bits"] == ["1.4 ECC or parity", "4.18 secondary, fabric reset needed"]
    assert decode_nvlink_registers(text.format(1 << 8 | 1 << 21, 0, 0, 0))["verdict"] == "link hardware"
    assert decode_nvlink_registers(text.format(1 << 22, 0, 0, 0))["verdict"] == "signal integrity"
    assert decode_nvlink_registers(text.format(0, 1 << 13, 0, 0))["verdict"] == "not expected in production"
    assert decode_nvlink_registers(text.format(1, 0, 0, 0))["verdict"] == "may be ignored"
    assert (
        decode_nvlink_registers(text.format(0, 0, 0, 1 << 20))["then"] == "none; field diagnostics can check the link"
    )
    assert decode_nvlink_registers(text.format(1 << 2, 0, 0, 0))["bits"] == ["1.2 not documented"]


@pytest.mark.parametrize(("number", "bit"), sorted(shipped_nvlink_rules().bits))
def test_every_documented_bit_is_decoded(number: int, bit: int) -> None:
    values = ["0x0"] * 7
    values[number - 1] = hex(1 << bit)
    rule = shipped_nvlink_rules().bits[number, bit]
    found = decode_nvlink_registers(f"NVLink: fatal error detected on link 2({', '.join(values)})")
    assert (found["verdict"], found["then"], found["repeats"]) == (rule.meaning, rule.next_action, rule.repeats)


def test_xid_74_without_registers_still_names_the_link() -> None:
    assert decode_nvlink_registers("NVLink: fatal error detected on link 6") == {"link": 6}
    assert decode_nvlink_registers("Channel 0x23, MMU Fault") == {}


@given(st.text(max_size=400), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_any_text_and_numbers_are_decoded_or_skipped(text: str, info: int, status: int) -> None:
    decode_nvlink_registers(text)
    decode_nvlink_registers(f"link 3({info:#x}, {status:#x}, {text}")
    for xid in range(144, 151):
        decode_unit_status(xid, text)
        decode_unit_status(xid, f"NETIR_LINK_EVT Fatal XC0 i0 Link 1 ({info:#x} {status:#x} {text}", 575)
