"""A reload asks before the old start ends whether the new one could listen."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.api.server import check_start
from pipeline.config.sections import Api, Config, Store
from pipeline.model.errors import ConfigError
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


def test_a_port_of_another_program_on_another_host_of_ours_is_not_free() -> None:
    with socket.create_server((LOOPBACK, 0)) as ours:
        port = ours.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)), pytest.raises(OSError, match="in use"):
            check_free("127.0.0.2", port, [(LOOPBACK, port)])


def test_a_start_that_could_not_serve_the_api_is_refused(tmp_path: Path) -> None:
    base = Config(store=Store(path=tmp_path / "s.duckdb"))
    with socket.create_server((LOOPBACK, 0)) as other:
        api = Api(port=other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"\[api\] host = '127.0.0.1', port = \d+: cannot listen: .* in use"):
            check_start(replace(base, api=api), (LOOPBACK, api.port + 1))
        check_start(replace(base, api=api), (LOOPBACK, api.port))
        with pytest.raises(ConfigError, match="beyond loopback without tokens"):
            check_start(replace(base, api=replace(api, host="0.0.0.0")), (LOOPBACK, api.port))
