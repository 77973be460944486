"""A reload asks before the old start ends whether the new one could listen."""

from __future__ import annotations

import socket

import pytest

from pipeline.runtime.free_ports import check_free

LOOPBACK = "127.0.0.1"


def test_a_port_of_another_program_is_not_free() -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        for host in (LOOPBACK, "0.0.0.0", "localhost"):
            with pytest.raises(OSError, match="in use"):
                check_free(host, port, [(LOOPBACK, port + 1)])
    check_free(LOOPBACK, port)


def test_a_port_of_this_process_is_free_for_its_next_start_on_a_host_that_exists() -> None:
    with socket.create_server((LOOPBACK, 0)) as ours:
        port = ours.getsockname()[1]
        for host in (LOOPBACK, "0.0.0.0", "localhost"):
            check_free(host, port, [(LOOPBACK, port)])
        check_free("127.0.0.2", port, [(LOOPBACK, port)])
        with pytest.raises(OSError, match="assign"):
            check_free("192.0.2.1", port, [("0.0.0.0", port)])


def test_a_host_that_can_have_no_address_is_an_error_of_the_system() -> None:
    """The codec of host names raises UnicodeError, which is no OSError."""
    for host in ("127.0.0..1", "h" * 64):
        with pytest.raises(OSError, match="not known"):
            check_free(host, 1, [(LOOPBACK, 1)])


def test_a_port_of_another_program_on_another_host_of_ours_is_not_free() -> None:
    with socket.create_server((LOOPBACK, 0)) as ours:
        port = ours.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)), pytest.raises(OSError, match="in use"):
            check_free("127.0.0.2", port, [(LOOPBACK, port)])
