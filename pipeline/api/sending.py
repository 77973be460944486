"""Sends a query's answer in pieces and within a deadline; the query's slot is free only when it is sent."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.api.query import Answer

SEND_SECONDS = 30.0
"""Within which a caller takes an answer (chosen: 64 MiB at 2.2 MB/s; who takes longer holds the memory of others)."""
PIECE = 256 * 1024
"""Bytes given to the connection at once (chosen: it waits between pieces for a caller who reads slowly)."""


class QueryResponse(Response):
    """One answer. What a caller does not take in time is dropped with the connection."""

    def __init__(self, answer: Answer, media_type: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(None, media_type=media_type, headers=headers)
        self.headers["Content-Length"] = str(len(answer.body))
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                body = memoryview(self._answer.body)
                for start in range(0, len(body), PIECE):
                    piece = bytes(body[start : start + PIECE])
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._answer.release()
