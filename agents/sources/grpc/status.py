"""What a failed call is: gRPC's status codes with names, and the exception that carries one."""

from __future__ import annotations

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 0, 1, 2, 3, 4, 5
PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 7, 8, 12, 13, 14
NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""grpc/doc/statuscodes.md."""
OF_HTTP = {400: INTERNAL, 401: 16, 403: PERMISSION_DENIED, 404: UNIMPLEMENTED, 429: 14, 502: 14, 503: 14, 504: 14}
"""grpc/doc/http-grpc-status-mapping.md; any other is UNKNOWN."""
LONGEST_MESSAGE = 512
"""Most characters of a server's words that are passed on; chosen: they go into one line of talk."""


class CallFailed(Exception):  # noqa: N818 - reads as what happened
    """A call gave no answer. `code` is gRPC's, also where this end found the fault."""

    def __init__(self, target: str, method: str, code: int, message: str) -> None:
        self.code = code
        name = NAMES[code] if 0 <= code < len(NAMES) else "unknown code"
        self.reason = f"{name} ({code}): {printable(message) or 'no message'}"
        super().__init__(f"{target}: {method}: {self.reason}")


def printable(text: str) -> str:
    """A server's text without what cannot be written in a line."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_MESSAGE]).strip()


def unescaped(message: bytes) -> str:
    """grpc-message is percent-encoded (grpc/doc/PROTOCOL-HTTP2.md)."""
    from urllib.parse import unquote_to_bytes  # here, since most agents make no call that fails

    return unquote_to_bytes(message).decode("utf-8", "replace")


def code_of(value: bytes) -> int:
    """grpc-status as a number; what is none is UNKNOWN."""
    return int(value) if value.isdigit() and len(value) <= 4 else UNKNOWN
