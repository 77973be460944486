"""The HTTP server of the pipeline: the application, and uvicorn in a thread that ends within a second."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from pipeline.api import problem, tokens
from pipeline.api.act_routes import act_router
from pipeline.api.backend import Backend
from pipeline.api.budget_routes import budget_router
from pipeline.api.device_routes import device_router
from pipeline.api.facility.routes import facility_router
from pipeline.api.guard import Guard
from pipeline.api.handover import HandOver, adopt_listener, start_stand_in
from pipeline.api.incident_list import incident_list_router
from pipeline.api.job_routes import job_router
from pipeline.api.map_routes import map_router
from pipeline.api.notifications import receiver_router
from pipeline.api.objectives.routes import objectives_router
from pipeline.api.people_routes import people_router
from pipeline.api.quality.routes import quality_router
from pipeline.api.rank_strip import strip_router
from pipeline.api.routes import (
    incident_router,
    mute_router,
    operation_router,
    process_router,
    program_version,
    read_router,
)
from pipeline.api.search import search_router
from pipeline.api.service import ApiContext
from pipeline.api.topology_routes import topology_router
from pipeline.config.sections import Api, Config
from pipeline.http.connections import limit_connections, make_protocol, raise_file_limit
from pipeline.model.errors import ConfigError, Unreachable
from pipeline.runtime.free_ports import check_free

_LOG = logging.getLogger(__name__)
_STARTS_WITHIN = 10.0
"""Time limit for the start of uvicorn (s). Chosen: it takes 0.1 s, on a busy machine ten times that."""
_TICK_S = 0.25
"""Time between two looks for a stop (s). Chosen: ten a second cost 2 ms of CPU, and a stop takes less than 1 s."""

LISTEN_BACKLOG = 2048
"""Length of the kernel's queue of new connections (chosen: a flood needs seconds to fill it; when it is full, callers
retry after 1, 3, 7 and 15 s)."""
ACCEPT_BATCH = 128
"""Connections accepted per loop (chosen: a quarter of the file descriptors reserved for the rest of the process)."""
STOP_GRACE_S = 0.4
"""Time that running answers get at shutdown (s). Chosen: the whole shutdown takes less than 1 s."""


def _utc_now() -> int:
    return time.time_ns() // 1000


def create_app(backend: Backend, config: Config, now: Callable[[], int] = _utc_now) -> FastAPI:
    """Returns the application. Raises ConfigError if it would listen beyond loopback without tokens."""
    known = tokens.read_tokens(config.api, roles=tokens.find_role_file(config.store.path), now=now)
    app = FastAPI(
        title="Fleetpulse",
        version=program_version(),
        docs_url=None,  # these pages load scripts from the internet
        redoc_url=None,
    )
    app.state.service = ApiContext(backend, config, now)
    for router in (
        process_router,
        read_router,
        map_router,
        search_router,
        incident_list_router,
        device_router,
        incident_router,
        mute_router,
        receiver_router,
        operation_router,
        people_router,
        quality_router,
        budget_router,
        topology_router,
        job_router,
        act_router,
        objectives_router,
        facility_router,
        strip_router,
    ):
        app.router.routes.extend(router.routes)  # include_router analyses each endpoint again: 50 ms an application
    problem.install_handlers(app)
    app.add_middleware(Guard, tokens=known, host=config.api.host, refused=backend.record_refusal)
    return app


class ApiServer:
    """A running server. host, port: the address it listens on; port 0 in the configuration selects a free one."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._listener = listener
        self._stand_in: HandOver | None = None
        self._thread = threading.Thread(target=server.run, args=([listener],), name="api", daemon=True)
        self._server = server
        self._thread.start()

    def wait_until_started(self) -> None:
        """Waits until requests are answered. Raises Unreachable after _STARTS_WITHIN."""
        deadline = time.monotonic() + _STARTS_WITHIN
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise Unreachable(f"API on {self.host}:{self.port}: did not start; see the log")
            time.sleep(0.01)

    def hand_over(self) -> None:
        """Lets a stand-in answer from now on, beside this server until it ends. Called before `stop`."""
        self._stand_in = start_stand_in(self._listener)

    def keep_listener(self, api: Api) -> None:
        """Keeps the socket and the stand-in, if there is one, for the start that follows in this process."""
        if self._stand_in is not None:
            self._stand_in.keep(api)

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended after `stop`. Returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def start_server(app: FastAPI, config: Config, stop: threading.Event) -> ApiServer:
    """Serves until `stop` is set; returns when requests are answered. Raises ConfigError if the port is taken."""
    tokens.read_tokens(config.api, roles=tokens.find_role_file(config.store.path))
    most = limit_connections(config.api.connections, raise_file_limit())
    server = _Server(
        uvicorn.Config(
            app,
            http=make_protocol(most),
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,  # else whoever calls from 127.0.0.1 writes "from where" into the audit
            lifespan="off",
            ws="none",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            backlog=ACCEPT_BATCH,
            h11_max_incomplete_event_size=16 * 1024,
        ),
        stop,
        app.state.service,
    )
    adopted, end_stand_in = adopt_listener(config.api)
    listener = adopted or _listen(config.api)
    serving = ApiServer(server, listener)
    serving.wait_until_started()
    try:
        listener.listen(LISTEN_BACKLOG)  # asyncio has set it to ACCEPT_BATCH
    except OSError:
        if not stop.is_set():  # the server's thread has ended, and closed it
            raise
    end_stand_in()
    app.state.service.queries.prepare()
    _LOG.info("API listens on http://%s:%d", serving.host, serving.port)
    return serving


class _Server(uvicorn.Server):
    """uvicorn that stops on an event instead of signals, which the process handles elsewhere."""

    def __init__(self, config: uvicorn.Config, stop: threading.Event, service: ApiContext) -> None:
        super().__init__(config)
        self._stop, self._service = stop, service

    async def main_loop(self) -> None:
        """As uvicorn's, which wakes ten times a second for the header `Date`, in every tenth tick."""
        while not await self.on_tick(0):
            await asyncio.sleep(_TICK_S)

    async def on_tick(self, counter: int) -> bool:
        """Returns whether the server shall stop."""
        return self._stop.is_set() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends running queries, then the server; closes open connections after STOP_GRACE_S."""
        self._service.queries.close()
        asyncio.get_running_loop().call_later(STOP_GRACE_S, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """Closes connections with an unfinished request."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listen(api: Api) -> socket.socket:
    """Binds the listening socket before the server's thread starts, so that a port in use raises ConfigError here."""
    family = socket.AF_INET
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(api.host).version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((api.host, api.port))
        listener.listen(LISTEN_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(_explain(api, error)) from error
    return listener


def check_listen(api: Api, own: tuple[str, int]) -> None:
    """Raises ConfigError if a start could not listen on [api] host and port. own: where this process listens now."""
    try:
        check_free(api.host, api.port, [own])
    except OSError as error:
        raise ConfigError(_explain(api, error)) from error


def _explain(api: Api, error: Exception) -> str:
    where = f"[api] host = {api.host!r}, port = {api.port}"
    return f"{where}: cannot listen: {error}; stop the program that uses the port, or configure another port"
