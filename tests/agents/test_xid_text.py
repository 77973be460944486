"""Kernel log lines of XIDs and SXids: all forms of the line, and the details of their codes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.gpu.xid_text import (
    XidLine,
    decode_detail,
    parse_sxid_line,
    parse_uuid_line,
    parse_xid_line,
    pci_without_function,
)

UUID = "GPU-0a1b2c3d-1111-2222-3333-444455556666"


def line(code: int, text: str, where: str = "PCI:0000:1d:00") -> XidLine:
    found = parse_xid_line(f"NVRM: Xid ({where}): {code}, pid=77, name=train, {text}")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "NVRM: Xid (PCI:0000:1d:00): 79, pid=77, name=train, GPU has fallen off the bus.",
            XidLine(79, "GPU has fallen off the bus.", "0000:1d:00", pid=77, process="train"),
        ),
        (
            "NVRM: Xid (PCI:0000:1d:00): 79, pid='<unknown>', name=<unknown>, gone.",
            XidLine(79, "gone.", "0000:1d:00"),
        ),
        ("NVRM: Xid (PCI:0000:1D:00): 79, gone.", XidLine(79, "gone.", "0000:1d:00")),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", XidLine(14, "Channel 00000001", "0000:03:00")),
        (f"NVRM: Xid ({UUID}): 31, Ch 1", XidLine(31, "Ch 1", uuid=UUID)),
        ("NVRM: Xid (PCI:00000000:1d:00.0): 63, a", XidLine(63, "a", "0000:1d:00")),
        ("NVRM: Xid (PCI:0000:1d:00): 31, pid=123", XidLine(31, "", "0000:1d:00", pid=123)),
        ("NVRM: Xid (PCI:0000:1d:00): 62, 1a2b 0000", XidLine(62, "1a2b 0000", "0000:1d:00")),
        (
            "NVRM: Xid (PCI:0000:1d:00 GPU-I:05 GPU-CI:01): 94, pid=7, Contained",
            XidLine(94, "Contained", "0000:1d:00", pid=7, gpu_instance=5, compute_instance=1),
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 145, pid=8, name=ray::Worker, RLW_CTRL",
            XidLine(145, "RLW_CTRL", "0018:01:00", pid=8, process="ray::Worker"),
        ),
    ],
)
def test_every_form_of_the_line_is_read(text: str, wanted: XidLine) -> None:
    assert parse_xid_line(text) == wanted
    assert parse_xid_line(f"[ 12.5] {text}") == wanted


@pytest.mark.parametrize(
    "text",
    ["", "NVRM: Xid : 32, pid=1", "NVRM: Xid (PCI:0000:66:00): abc", "Xid (PCI:0000:66:00): 3", "NVRM: GPU lost"],
)
def test_other_lines_are_not_xids(text: str) -> None:
    assert parse_xid_line(text) is None


@pytest.mark.parametrize(
    ("code", "text", "wanted"),
    [
        (
            13,
            "Graphics SM Warp Exception on (GPC 2, TPC 4, SM 1): Out Of Range Address",
            {"gpc": 2, "tpc": 4, "sm": 1, "error": "Out Of Range Address"},
        ),
        (13, "Graphics Exception: ESR 0x51af30=0x1c 0x51af34=0x20", {"esr": {"0x51af30": "0x1c", "0x51af34": "0x20"}}),
        (
            13,
            "Graphics Exception: ChID 000c, Class 0000cbc0, Offset 000002b4, Data 1",
            {"channel": "000c", "gpu_class": "0000cbc0", "offset": "000002b4"},
        ),
        (
            31,
            "Ch 00000010, intr 1. MMU Fault: ENGINE CE2 HUBCLIENT_CE0 faulted @ 0x7f1c_2000f000. "
            "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
            {
                "channel": "00000010",
                "engine": "CE2",
                "client": "HUBCLIENT_CE0",
                "address": "0x7f1c2000f000",
                "fault": "FAULT_PDE",
                "access": "ACCESS_TYPE_VIRT_WRITE",
            },
        ),
        (43, "Ch 0000000a", {"channel": "0000000a"}),
        (45, "channel 0x00000002", {}),
        (
            48,
            "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at physAddr 0x2a00 "
            "partition 9, subpartition 1.",
            {"address": "0x2a00", "partition": 9, "subpartition": 1, "where": "framebuffer"},
        ),
        (63, "Row Remapper: New row (0x00000000001c0ffe) marked for remapping", {"row": "0x00000000001c0ffe"}),
        (63, "Row remapping event: Rows 0x1a and 0x2b have been remapped", {"rows": "0x1a and 0x2b"}),
        (63, "Dynamic Page Retirement: New page retired, reboot to activate (0x0a1b2c).", {"page": "0x0a1b2c"}),
        (64, "Row Remapper: New row marked for remapping", {}),
        (
            94,
            "Contained: CE User Channel (0x9). RST: No, D-RST: No",
            {
                "contained": "Contained",
                "unit": "CE User Channel",
                "sub_unit": "0x9",
                "reset_required": False,
                "drain_required": False,
            },
        ),
        (
            95,
            "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
            {
                "contained": "Uncontained",
                "unit": "LTC TAG",
                "sub_unit": "0x2,0x0",
                "reset_required": True,
                "drain_required": False,
            },
        ),
        (109, "Ch 08, errorString CTX SWITCH TIMEOUT, Info 0x3", {"channel": "08", "error": "CTX SWITCH TIMEOUT"}),
        (
            119,
            "Timeout after 45s of waiting for RPC response from GPU3 GSP! Expected function 76 (GSP_RM_CONTROL) "
            "(0x20800a2a 0x58c).",
            {
                "seconds": 45,
                "gsp_gpu": 3,
                "function": 76,
                "function_name": "GSP_RM_CONTROL",
                "argument": "0x20800a2a",
                "size": "0x58c",
            },
        ),
        (
            120,
            "GSP kernel exception: store access page fault (cause:0xf) @ pc:0xffffffff93003d42, partition:4#0",
            {"task": "kernel", "error": "store access page fault", "cause": "0xf", "pc": "0xffffffff93003d42"},
        ),
    ],
)  # fmt: skip
def test_details_of_a_code_are_decoded(code: int, text: str, wanted: dict[str, Any]) -> None:
    assert decode_detail(line(code, text)) == wanted


@pytest.mark.parametrize(
    ("text", "to", "action"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", 1, "reset GPU"),
        ("0x0 (None) to 0x2 (Node Reboot Required)", 2, "reboot node"),
        ("0x0 (None) to 0x2 (OS Reboot)", 2, "reboot node"),
        ("0x0 (None) to 0x3 (Drain P2P)", 3, "drain peer-to-peer"),
        ("0x1 (PF FLR) to 0x4 (Drain and Reset)", 4, "drain and reset GPU"),
        ("0x4 (Drain and Reset) to 0x0 (None)", 0, "none"),
        ("0x0 (None) to 0x9 (Something New)", 9, "Something New"),
    ],
)
def test_the_recovery_action_is_decoded_by_number(text: str, to: int, action: str) -> None:
    found = decode_detail(line(154, f"GPU recovery action changed from {text}"))
    assert (found["to"], found["action"]) == (to, action)


def test_mig_instances_are_details() -> None:
    found = decode_detail(line(43, "Ch 1", "PCI:0000:1d:00 GPU-I:05 GPU-CI:02"))
    assert found == {"channel": "1", "gpu_instance": 5, "compute_instance": 2}


def test_nvlink_codes_are_decoded_by_their_rules() -> None:
    assert (
        decode_detail(line(74, "NVLink: fatal error detected on link 3(0x10, 0x0, 0x0)"))["verdict"] == "ECC or parity"
    )
    assert decode_detail(line(144, "SAW_MVB Fatal XC0 i0 Link 00 (0x1 0x2)"), 575)["action"] == "reset GPU"


@pytest.mark.parametrize(
    ("rest", "code", "fatal", "found"),
    [
        ("20034, Fatal, Link 30 LTSSM Fault Up", 20034, True, {"link": 30}),
        ("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", 12028, False, {"link": 32}),
        (
            "20034, Severity 1 Engine instance 62 Sub-engine instance 00",
            20034,
            None,
            {"severity_code": 1, "engine": 62, "sub_engine": 0},
        ),
        ("11012, Data {0x50610002, 0x10100030}", 11012, None, {"data": ["0x50610002", "0x10100030"]}),
    ],
)
def test_switch_errors_have_code_severity_and_link(rest: str, code: int, fatal: bool | None, found: object) -> None:
    parsed = parse_sxid_line(f"nvidia-nvswitch2: SXid (PCI:0000:07:00.0): {rest}")
    assert parsed is not None
    assert (parsed.code, parsed.switch, parsed.pci, parsed.fatal) == (code, "nvidia-nvswitch2", "0000:07:00", fatal)
    assert parsed.detail == found


def test_the_line_before_a_gpus_first_xid_names_its_uuid() -> None:
    assert parse_uuid_line(f"NVRM: GPU at PCI:0000:1D:00: {UUID}") == ("0000:1d:00", UUID)
    assert parse_uuid_line("NVRM: GPU Board Serial Number: 1") is None


def test_addresses_are_made_comparable() -> None:
    assert {pci_without_function(a) for a in ("0000:1D:00", "00000000:1d:00.0", "0000:1d:00.0")} == {"0000:1d:00"}


@given(st.text(max_size=600), st.integers(0, 999_999_999))
def test_any_text_is_decoded_or_skipped(text: str, code: int) -> None:
    parse_sxid_line(f"nvidia-nvswitch0: SXid (PCI:0000:07:00.0): {code}, {text}")
    for chosen in (code, 13, 31, 48, 63, 94, 109, 119, 120, 154):
        found = parse_xid_line(f"NVRM: Xid (PCI:0000:1d:00): {chosen}, {text}")
        assert found is not None
        assert all(len(str(value)) < 700 for value in decode_detail(found).values())


PIECES = (
    *("Fatal ", "AAAA ", "A", "Link 1 ", "link 1(0x0, ", "0x1=0x2 ", "Rows 0x1, ", "page ", "Contained: a ", "GPC 1, "),
    *(
        "faulted @ 0x1",
        "Expected function ",
        "changed from 0x0 (",
        "pid=1, name=",
        "(PCI:0000:1d:00): ",
        "partition 1 ",
    ),
    *("NVRM: Xid (", "Unit Fatal XC0 i0 Link 1 (", "0x1 ", " ", "Severity 1 Engine instance "),
)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_repeated_to_the_end_of_the_line_takes_bounded_time(piece: str) -> None:
    begun = time.process_time()
    for code in (13, 31, 48, 63, 74, 94, 109, 119, 120, 144, 154):
        found = parse_xid_line(f"NVRM: Xid (PCI:0000:1d:00): {code}, {piece * 1024}"[:1024])
        assert found is not None
        decode_detail(found)
        parse_sxid_line(f"nvidia-nvswitch0: SXid (PCI:0000:07:00.0): {code}, {piece * 1024}"[:1024])
    assert time.process_time() - begun < 0.5
