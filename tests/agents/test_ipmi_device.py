"""The real path through open, ioctl and poll: the kernel's structures as its header has them, and a BMC behind them."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.bmc import ipmi_device
from tests.agents.bmc import Board, event, server

ROOT = Path(__file__).parents[2]
HEADER = Path("/usr/include/linux/ipmi.h")
PACKET = struct.Struct("=qBBBB")  # of ipmi_device.c: msgid, recv_type, netfn, cmd, lun; then data
CPU = "sensor:n1.ipmi.CPU1-Temp sensor.temperature"
LAYOUT = r"""
#include <linux/ipmi.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/ioctl.h>
#define SIZE(type) printf("%s %zu\n", #type, sizeof(struct type))
#define FIELD(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(struct type, field))
int main(void)
{
	printf("SEND_COMMAND %u\n", (unsigned)IPMICTL_SEND_COMMAND);
	printf("RECEIVE_MSG_TRUNC %u\n", (unsigned)IPMICTL_RECEIVE_MSG_TRUNC);
	SIZE(ipmi_system_interface_addr); SIZE(ipmi_msg); SIZE(ipmi_req); SIZE(ipmi_recv); SIZE(ipmi_addr);
	printf("max %d\n", IPMI_MAX_MSG_LENGTH);
	FIELD(ipmi_system_interface_addr, addr_type); FIELD(ipmi_system_interface_addr, channel);
	FIELD(ipmi_system_interface_addr, lun); FIELD(ipmi_msg, netfn); FIELD(ipmi_msg, cmd);
	FIELD(ipmi_msg, data_len); FIELD(ipmi_msg, data); FIELD(ipmi_req, addr); FIELD(ipmi_req, addr_len);
	FIELD(ipmi_req, msgid); FIELD(ipmi_req, msg); FIELD(ipmi_recv, recv_type); FIELD(ipmi_recv, addr);
	FIELD(ipmi_recv, addr_len); FIELD(ipmi_recv, msgid); FIELD(ipmi_recv, msg);
	return 0;
}
"""
LOOK = """
import json, sys
from agents.collector import NoData
from agents.collectors.bmc.ipmi import Ipmi
ipmi, looks = Ipmi(timeout=float(sys.argv[2])), []
try:
    ipmi.open("n1")
    for _ in range(int(sys.argv[1])):
        found = ipmi.read()
        columns = {f"{e} {s}": str(v[i]) for r in found for s, v in r.columns.items() for i, e in enumerate(r.entities)}
        events = [[e.entity, e.kind, dict(e.data)] for r in found for e in r.events]
        looks.append({"entities": [e for r in found for e in r.entities], "columns": columns, "events": events})
    print(json.dumps({"looks": looks}))
except NoData as absent:
    print(json.dumps({"no data": str(absent)}))
ipmi.close()
ipmi.close()
"""


@pytest.fixture(scope="session")
def compiler() -> str:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: install it to test the IPMI device")
    if not HEADER.exists():
        pytest.skip(f"no {HEADER}: install linux-libc-dev to test the IPMI device")
    return "gcc"


@pytest.fixture(scope="session")
def device(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload, which plays /dev/ipmi0."""
    library = tmp_path_factory.mktemp("ipmi") / "ipmi_device.so"
    source = Path(__file__).with_name("ipmi_device.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def test_our_structs_match_the_kernel_header(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "layout.c").write_text(LAYOUT)
    subprocess.run([compiler, "-o", str(tmp_path / "layout"), str(tmp_path / "layout.c")], check=True)
    message = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    kernel = {name: int(value) for name, value in (line.split() for line in message.splitlines())}
    ours = {
        "ipmi_system_interface_addr": ipmi_device.SystemInterface,
        "ipmi_msg": ipmi_device.Message,
        "ipmi_req": ipmi_device.Request,
        "ipmi_recv": ipmi_device.Received,
    }
    assert kernel.pop("SEND_COMMAND") == ipmi_device.SEND_COMMAND
    assert kernel.pop("RECEIVE_MSG_TRUNC") == ipmi_device.RECEIVE_MSG_TRUNC
    assert kernel.pop("ipmi_addr") == ipmi_device._MAX_ADDRESS
    assert kernel.pop("max") == ipmi_device._MAX_MESSAGE
    found = {name: ctypes.sizeof(structure) for name, structure in ours.items()}
    for name, structure in ours.items():
        found |= {f"{name}.{field}": getattr(structure, field).offset for field, _ in structure._fields_}
    assert found == kernel


class SimulatedBmc:
    """Answers at the other end of the device.

    noise: whether unexpected packets come before each response. late: seconds of delay, once. leave_at: the
    request at which the device goes away.
    """

    def __init__(self, board: Board, path: Path) -> None:
        self.board, self.path = board, path
        self.noise = False
        self.leave_at: tuple[int, int] | None = None
        self.late: dict[tuple[int, int], float] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(path))
        self._door.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._door.close()
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                talk, _ = self._door.accept()
            except OSError:  # the door was shut: the test is over
                return
            with talk:
                while packet := talk.recv(1024):
                    self._answer(talk, packet)

    def _answer(self, talk: socket.socket, packet: bytes) -> None:
        number, _, netfn, command, lun = PACKET.unpack_from(packet)
        if (netfn, command) == self.leave_at:
            talk.shutdown(socket.SHUT_RDWR)
            return
        answer = self.board.answer(netfn, command, packet[PACKET.size :], lun)
        if self.noise:
            talk.send(PACKET.pack(0, 2, 4, 2, 0) + b"\x01" * 16)  # an unrequested event
            talk.send(PACKET.pack(number - 1, 1, netfn | 1, command, lun) + b"\0\xee\xee\xee")  # an answer too late
            talk.send(PACKET.pack(number, 1, netfn | 1, command ^ 1, lun) + b"\0\xdd")  # to another command
        if answer is not None:
            time.sleep(self.late.pop((netfn, command), 0))  # a BMC that is slow, in real time
            talk.send(PACKET.pack(number, 1, netfn | 1, command, lun) + answer)


@pytest.fixture
def simulated_bmc(tmp_path: Path) -> Iterator[SimulatedBmc]:
    made = SimulatedBmc(server(), tmp_path / "bmc")
    yield made
    made.close()


def read_once(
    device: Path, simulated_bmc: SimulatedBmc, reads: int = 1, timeout: float = 5.0, **environ: str
) -> dict[str, Any]:
    """The collector's results in a separate process whose /dev/ipmi0 is the simulated board."""
    environ = {
        **os.environ,
        "LD_PRELOAD": str(device),
        "IPMI_STUB_PATH": "/dev/ipmi0",
        "IPMI_STUB_SOCKET": str(simulated_bmc.path),
        **environ,
    }
    command = [sys.executable, "-c", LOOK, str(reads), str(timeout)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_whole_server_is_read_through_the_device(device: Path, simulated_bmc: SimulatedBmc) -> None:
    board = simulated_bmc.board
    board.write(event(board.clock - 5, 0x08, 0x41, 0x6F, b"\x03"))
    first, second = read_once(device, simulated_bmc, 2)["looks"]
    assert first["columns"]["node:n1 node.power"] == "640.0"
    assert first["columns"]["sensor:n1.ipmi.PS-Status-2 sensor.status"] == str(0xB)
    assert first["columns"]["sensor:n1.ipmi.Inlet-Temp sensor.temperature"] == "-16.0"
    assert [(e[1], e[2]["event"]) for e in first["events"]] == [("sel", "input lost")]
    assert second["columns"] == first["columns"]
    assert second["events"] == []


def test_unexpected_messages_are_dropped(device: Path, simulated_bmc: SimulatedBmc) -> None:
    quiet = read_once(device, simulated_bmc)
    simulated_bmc.noise = True
    assert read_once(device, simulated_bmc) == quiet


@pytest.mark.slow
def test_a_late_response_is_not_used_for_the_next_request(device: Path, simulated_bmc: SimulatedBmc) -> None:
    simulated_bmc.late[0x2C, 0x02] = 1.5
    first, second = read_once(device, simulated_bmc, 2, timeout=1.0)["looks"]
    assert first["columns"]["node:n1 node.power"] == "nan"
    assert first["columns"][CPU] == "90.0"
    assert second["columns"]["node:n1 node.power"] == "640.0"


def test_a_too_long_response_is_truncated(device: Path, simulated_bmc: SimulatedBmc) -> None:
    simulated_bmc.board.readings[0x01] = bytes((90, 0xC0, 0xC8)) + bytes(300)
    assert read_once(device, simulated_bmc)["looks"][0]["columns"][CPU] == "90.0"


def test_a_bmc_without_response_is_no_data_after_one_timeout(device: Path, simulated_bmc: SimulatedBmc) -> None:
    simulated_bmc.board.silent.add((0x06, 0x01))
    begun = time.monotonic()
    message = read_once(device, simulated_bmc, timeout=0.3)["no data"]
    assert message == "/dev/ipmi0: BMC did not respond to command 01h within 0.3 s"
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("request_", [(0x06, 0x01), (0x04, 0x2D)])
def test_a_device_that_disappears_is_no_data(
    device: Path, simulated_bmc: SimulatedBmc, request_: tuple[int, int]
) -> None:
    simulated_bmc.leave_at = request_
    assert read_once(device, simulated_bmc)["no data"] == "/dev/ipmi0: No such device"


@pytest.mark.parametrize(
    ("number", "message"), [("13", "add CAP_DAC_OVERRIDE"), ("6", "No such device or address"), ("2", "no /dev/ipmi0")]
)
def test_a_device_that_does_not_open_is_no_data_with_its_fix(
    device: Path, simulated_bmc: SimulatedBmc, number: str, message: str
) -> None:
    assert message in read_once(device, simulated_bmc, IPMI_STUB_ERRNO=number)["no data"]
