"""A WebSocket has none of the deadlines of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect

from pipeline.http import connections


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Accepts a WebSocket and sends back each text."""
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


async def ask_twice(pause: float) -> list[Any]:
    """Returns two answers over one WebSocket, the second after a pause (s)."""
    config = uvicorn.Config(
        echo, port=0, http=connections.make_protocol(16), ws="websockets-sansio", lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with connect(f"ws://127.0.0.1:{port}", proxy=None) as socket:
            await socket.send("first")
            answers = [await socket.recv()]
            await asyncio.sleep(pause)
            await socket.send("second")
            return [*answers, await socket.recv()]
    finally:
        server.should_exit = True
        await running


def test_a_websocket_stays_open_longer_than_a_request_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)
    assert asyncio.run(ask_twice(0.5)) == ["first", "second"]
