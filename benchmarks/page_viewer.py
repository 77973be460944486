"""A viewer of the dashboard without a browser: speaks Streamlit's protocol over a WebSocket, as its frontend does.

It sends no JavaScript, so that a hundred fit into one process; what the server sends is read as text.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect

WAIT_S = 30.0
"""Longest wait for one run of a page (s). Chosen: a page that takes longer has failed."""


@dataclass
class Run:
    """One run of a page: what it drew as text, its size (bytes) and time (s), and the fragments that refresh it."""

    texts: list[str] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)
    size: int = 0
    seconds: float = 0.0
    exceptions: list[str] = field(default_factory=list)
    login: str = ""
    """Address that a login or logout leads to."""
    buttons: dict[str, str] = field(default_factory=dict)
    """Identity of each button's widget by its label."""
    interval: float = 0.0

    @property
    def text(self) -> str:
        """All texts in order."""
        return "\n".join(self.texts)

    def forget_drawn(self) -> None:
        """Forgets what was drawn: the page begins again, and what it draws then replaces it."""
        self.texts.clear()
        self.buttons.clear()
        self.fragments.clear()


class Viewer:
    """One session. base: address of the dashboard. cookies: those of a login. headers: of a proxy in front."""

    def __init__(self, base: str, cookies: dict[str, str] | None = None, headers: dict[str, str] | None = None) -> None:
        self._base, self._cookies, self._headers = base.rstrip("/"), dict(cookies or {}), dict(headers or {})
        self._socket: ClientConnection | None = None

    async def open(self, page: str = "", query: str = "") -> Run:
        """Connects and runs a page. page: as in its address; empty: the first one."""
        async with httpx.AsyncClient(trust_env=False, headers=self._headers) as http:
            found = await http.get(f"{self._base}/_stcore/health", timeout=WAIT_S)
            self._cookies |= dict(found.cookies.items())
        parts = urlsplit(self._base)
        token = self._cookies.get("_streamlit_xsrf", "")
        jar = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        self._socket = await connect(
            f"ws://{parts.netloc}{parts.path}/_stcore/stream",
            origin=f"{parts.scheme}://{parts.netloc}",  # type: ignore[arg-type] # its type is private
            subprotocols=["streamlit", token] if token else ["streamlit"],  # type: ignore[list-item]
            additional_headers={**self._headers, "Cookie": jar},
            max_size=None,
            compression=None,
            proxy=None,
            ping_interval=None,  # the server pings
        )
        return await self.run(page, query)

    async def run(
        self, page: str = "", query: str = "", fragment: str = "", clicked: str = "", auto: bool = False
    ) -> Run:
        """Runs the page, or one fragment of it, and waits for its end. clicked: identity of a button's widget."""
        assert self._socket is not None
        message = BackMsg()
        state = message.rerun_script
        state.query_string, state.page_name, state.fragment_id, state.is_auto_rerun = query, page, fragment, auto
        if clicked:
            state.widget_states.widgets.add(id=clicked, trigger_value=True)
        begun = time.perf_counter()
        await self._socket.send(message.SerializeToString())
        run = await asyncio.wait_for(self._read(), WAIT_S)
        run.seconds = time.perf_counter() - begun
        return run

    async def _read(self) -> Run:
        assert self._socket is not None
        run = Run()
        while True:
            raw = await self._socket.recv()
            assert isinstance(raw, bytes)
            run.size += len(raw)
            message = ForwardMsg.FromString(raw)
            kind = message.WhichOneof("type")
            if kind == "delta":
                _add_element(run, message.delta.new_element)
            elif kind == "auto_rerun":
                run.fragments.append(message.auto_rerun.fragment_id)
                run.interval = message.auto_rerun.interval
            elif kind == "auth_redirect":
                run.login = message.auth_redirect.url
            elif kind == "script_finished":
                if message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                    return run
                run.forget_drawn()

    async def close(self) -> None:
        """Leaves."""
        if self._socket is not None:
            await self._socket.close()


def _add_element(run: Run, element: Any) -> None:
    kind = element.WhichOneof("type")
    if kind == "exception":
        run.exceptions.append(f"{element.exception.type}: {element.exception.message}")
    elif kind == "button":
        run.buttons[element.button.label] = element.button.id
    if kind is not None:
        run.texts.extend(_texts(getattr(element, kind)))


def _texts(message: Any) -> Iterator[str]:
    """Yields the texts of an element at any depth: headings, markup, labels, data of components."""
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else [value]
        if descriptor.type == descriptor.TYPE_STRING:
            yield from (str(text) for text in values)
        elif descriptor.type == descriptor.TYPE_MESSAGE and not descriptor.message_type.GetOptions().map_entry:
            for inner in values:
                yield from _texts(inner)


def checksum(run: Run) -> int:
    """Returns a number that changes with what a run drew."""
    return zlib.crc32(run.text.encode())
