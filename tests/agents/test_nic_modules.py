"""The memory of modules, built byte by byte from SFF-8472, SFF-8636 and CMIS, and the kernel's netlink answers."""

from __future__ import annotations

import errno
import math
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.nic.ethtool import ModuleReader, TransceiverModule, parse_module
from agents.collectors.nic.ethtool_requests import (
    EthtoolIoctl,
    EthtoolNetlink,
    decode_attributes,
    decode_messages,
    encode_attribute,
)


def write_values(memory: bytearray, at: int, layout: str, *values: int) -> None:
    struct.pack_into(layout, memory, at, *values)


def named(memory: bytearray, vendor: int, part: int, serial: int) -> None:
    for at, text in ((vendor, b"ACME OPTICS"), (part, b"AO-400-DR4"), (serial, b"SN0042")):
        memory[at : at + 16] = text.ljust(16)


NAMES = {"module_vendor": "ACME OPTICS", "module_part": "AO-400-DR4", "module_serial": "SN0042"}


def sfp(diagnostics: int = 0x68) -> bytes:
    memory = bytearray(512)
    memory[0], memory[92] = 0x03, diagnostics
    named(memory, 20, 40, 68)
    write_values(memory, 256 + 96, ">hHHHH", -5 * 256 + 128, 33_000, 3_000, 5_000, 4_000)
    return bytes(memory)


def qsfp(technology: int = 0x00, sent: bool = True, voltage: int = 32_500) -> bytes:
    memory = bytearray(256)
    memory[0], memory[147], memory[220] = 0x11, technology, 0x04 if sent else 0
    named(memory, 148, 168, 196)
    write_values(memory, 22, ">h", 45 * 256 + 64)
    write_values(memory, 26, ">H", voltage)
    write_values(memory, 34, ">4H", 10_000, 9_000, 120, 11_000)
    write_values(memory, 42, ">4H", 3_000, 3_500, 3_100, 3_200)
    write_values(memory, 50, ">4H", 8_000, 7_000, 9_000, 8_500)
    return bytes(memory)


def osfp(adverts: tuple[int, int] = (0x03, 0x0F), paths: bytes = b"\x44\x44\x00\x00") -> tuple[bytes, bytes, bytes]:
    memory, first, eleventh = bytearray(256), bytearray(128), bytearray(128)
    memory[0] = 0x19
    named(memory, 129, 148, 166)
    write_values(memory, 14, ">hH", 52 * 256, 33_100)
    first[159 - 128], first[160 - 128] = adverts
    eleventh[:4] = paths
    write_values(eleventh, 154 - 128, ">8H", 9_000, 9_100, 9_200, 8_900, 0, 0, 0, 0)
    write_values(eleventh, 170 - 128, ">8H", 30_000, 30_500, 30_100, 30_200, 0, 0, 0, 0)
    write_values(eleventh, 186 - 128, ">8H", 7_000, 600, 7_200, 7_100, 0, 0, 0, 0)
    return bytes(memory), bytes(first), bytes(eleventh)


def close_to(module: TransceiverModule, wanted: list[float]) -> bool:
    return module.worst_lane_values() == pytest.approx(wanted, nan_ok=True)


def test_an_sfp_has_its_diagnostics() -> None:
    module = parse_module(sfp())
    assert close_to(module, [-4.5, 3.3, 0.4, 0.5, 6.0])
    assert module.names == NAMES


@pytest.mark.parametrize("diagnostics", [0x00, 0x50])
def test_an_sfp_without_diagnostics_or_with_external_calibration_has_only_names(diagnostics: int) -> None:
    module = parse_module(sfp(diagnostics))
    assert close_to(module, [math.nan] * 5)
    assert module.names == NAMES
    assert parse_module(sfp()[:256]).names == NAMES


def test_a_qsfp_has_its_worst_lane() -> None:
    module = parse_module(qsfp())
    assert close_to(module, [45.25, 3.25, 0.012, 0.7, 7.0])
    assert module.names == NAMES
    assert close_to(parse_module(qsfp(sent=False)), [45.25, 3.25, 0.012, math.nan, 7.0])


def test_a_copper_cable_has_no_optics_and_a_silent_one_no_thermometer() -> None:
    assert close_to(parse_module(qsfp(technology=0xA0)), [45.25, 3.25, math.nan, math.nan, math.nan])
    assert close_to(parse_module(qsfp(voltage=0)), [math.nan] * 5)


def test_an_osfp_has_its_active_lanes_in_the_modules_scale() -> None:
    module = parse_module(*osfp())
    assert close_to(module, [52.0, 3.31, 0.06, 0.89, 122.0])  # bias counts in steps of 2 uA, times 2 as advertised
    assert module.names == NAMES
    assert close_to(parse_module(*osfp(paths=bytes(4))), [52.0, 3.31, 0, 0, 122.0])  # none is activated: all count


def test_an_osfp_has_only_its_advertised_values() -> None:
    assert close_to(parse_module(*osfp(adverts=(0x01, 0x04))), [52.0, math.nan, 0.06, math.nan, math.nan])
    memory, _, _ = osfp()
    assert close_to(parse_module(memory), [math.nan] * 5)  # flat memory: a passive cable


@given(st.binary(max_size=700), st.binary(max_size=200), st.binary(max_size=200), st.sampled_from([3, 13, 17, 24, 25]))
def test_no_memory_breaks_the_parser(memory: bytes, one: bytes, eleven: bytes, identifier: int) -> None:
    for whole in (memory, bytes([identifier]) + memory.ljust(511, b"\xa5")):
        module = parse_module(whole, one, eleven)
        assert len(module.worst_lane_values()) == 5
        assert all(text.isprintable() for text in module.names.values())


@given(st.binary(max_size=400))
def test_no_response_breaks_the_netlink_parsers(data: bytes) -> None:
    assert len(list(decode_messages(data))) <= 25
    assert len(list(decode_attributes(data))) <= 100


# --- a kernel on the other side of a socket --------------------------------------------------------------------------

FAMILY = 0x15


def kernel(side: socket.socket, pages: dict[int, bytes], error: int = 0) -> None:
    """Answers as genetlink does: the data, then an acknowledgement; a late answer of before first."""
    while question := side.recv(4096):
        _, family, _, sequence, _ = struct.unpack_from("=IHHII", question)
        netlink_client = dict(decode_attributes(question[20:]))
        if family == 16:
            body = encode_attribute(1, struct.pack("=H", FAMILY))
        else:
            assert family == FAMILY
            assert dict(decode_attributes(netlink_client[1])) == {2: b"eth0\0"}
            assert struct.unpack("=I", netlink_client[3]) == (128,)
            whole = pages[
                netlink_client[4][0] or (netlink_client[6][0] != 0x50) * netlink_client[6][0] << 8
            ]  # page, or address on the bus
            body = encode_attribute(7, whole[:128] if struct.unpack("=I", netlink_client[2]) == (0,) else whole[-128:])
        late = struct.pack("=IHHIIi", 20, 2, 0, sequence - 1, 0, -errno.EIO)
        answer = struct.pack("=IHHIIBBH", 20 + len(body), family, 0, sequence, 0, 32, 1, 0) + body
        code = error if family == FAMILY else 0
        done = struct.pack("=IHHIIi", 20, 2, 0, sequence, 0, -code)
        side.send(late + (b"" if code else answer) + done)


def netlink_client(pages: dict[int, bytes], error: int = 0) -> EthtoolNetlink:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        with theirs:
            kernel(theirs, pages, error)

    threading.Thread(target=serve, daemon=True).start()
    return EthtoolNetlink(ours)


def test_pages_are_requested_by_name_and_number() -> None:
    memory, first, eleventh = osfp()
    netlink = netlink_client({0: memory, 1: first, 0x11: eleventh})
    whole = netlink.read_page("eth0", 0, offset=0) + netlink.read_page("eth0", 0)
    assert whole == memory
    assert (netlink.read_page("eth0", 1), netlink.read_page("eth0", 0x11)) == (first, eleventh)
    netlink.close()


def test_a_refusal_is_the_kernels_error() -> None:
    netlink = netlink_client({0: bytes(256)}, errno.EPERM)
    with pytest.raises(PermissionError):
        netlink.read_page("eth0", 0)
    netlink.close()


def test_this_kernel_has_the_netlink_family_and_refuses_an_unknown_interface() -> None:
    try:
        netlink = EthtoolNetlink()
    except OSError as refused:
        pytest.skip(f"no netlink family ethtool here: {refused}")
    with pytest.raises(OSError, match=r"No such device|not permitted|not supported"):
        netlink.read_page("absent0", 0)
    netlink.close()


def test_a_reader_reads_the_pages_of_the_modules_standard() -> None:
    memory, first, eleventh = osfp()
    calls = EthtoolIoctl()
    for pages, wanted in (
        ({0: memory, 1: first, 0x11: eleventh}, parse_module(memory, first, eleventh)),
        ({0: qsfp()}, parse_module(qsfp())),
        ({0: osfp()[0][:2] + b"\x80" + osfp()[0][3:]}, TransceiverModule(names=NAMES)),  # flat: a passive cable
    ):
        reader = ModuleReader(calls, netlink_client(pages))
        assert reader.read("eth0").worst_lane_values() == pytest.approx(wanted.worst_lane_values(), nan_ok=True)
        assert reader.read("eth0").names == NAMES
        reader.close()
    calls.close()


def test_a_reader_finds_the_diagnostics_of_an_sfp_at_their_own_address() -> None:
    calls = EthtoolIoctl()
    reader = ModuleReader(calls, netlink_client({0: sfp()[:256], 0x51 << 8: sfp()[256:384]}))
    assert close_to(reader.read("eth0"), [-4.5, 3.3, 0.4, 0.5, 6.0])
    reader.close()
    calls.close()


def test_a_reader_names_the_missing_privilege() -> None:
    calls = EthtoolIoctl()
    reader = ModuleReader(calls, netlink_client({0: bytes(256)}, errno.EPERM))
    with pytest.raises(PermissionError):
        reader.read("eth0")
    assert reader.missing_privilege == "module memory not readable: add CAP_NET_ADMIN"
    reader.close()
    calls.close()
