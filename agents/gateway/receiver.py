"""What a gateway does with a request, whichever protocol brought it: check, store, count, and record what it refuses.

A refusal has one of REASONS. The newest refusals of each sender are kept for `GET /senders` and `fleetpulse doctor`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from agents.gateway.intake import DurableIntake, Overloaded, TooLarge
from agents.protobuf import MalformedMessage, ProtobufMessage
from pipeline.api.tokens import Tokens
from pipeline.model.names import clean_text
from pipeline.model.records import Origin, iso

MAX_REQUEST = 16 << 20
"""Largest request, compressed or not: the largest body of the wire format."""
REASONS = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.UNAUTHORIZED: "token",
    HTTPStatus.NOT_FOUND: "path",
    HTTPStatus.LENGTH_REQUIRED: "length",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "format",
    HTTPStatus.TOO_MANY_REQUESTS: "busy",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}
"""Status of a refusal -> its reason in /metrics."""
OTLP_FORMAT, V1_FORMAT, V2_FORMAT = "otlp", "prometheus1", "prometheus2"
"""Formats of requests in the wire format."""
PROTOCOLS = {OTLP_FORMAT: ("http", "grpc"), V1_FORMAT: ("http",), V2_FORMAT: ("http",)}
MAX_SENDERS = 256
"""Refused senders that are kept, newest first. Chosen: 100 kB."""
_MAX_WHY = 200


class RequestError(Exception):
    """A request that is refused with an HTTP status, which gRPC translates."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status

    @property
    def may_retry(self) -> bool:
        """Whether the same request may be accepted later."""
        return self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class RefusedSender:
    """Requests of one sender that were refused for one reason. last: UTC us."""

    sender: str
    reason: str
    why: str
    count: int
    last: int


class Receiver:
    """Accepts requests into a DurableIntake. Its methods may be called from any thread.

    local: whether every request is telemetry of `origin.node` itself.
    """

    def __init__(
        self,
        intake: DurableIntake,
        origin: Origin,
        tokens: Tokens,
        local: bool = False,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.intake, self.tokens, self.local = intake, tokens, local
        self._origin, self._clock = origin, clock
        self._lock = threading.Lock()
        self._accepted = Counter[tuple[str, str]]()
        self._refused = Counter[str]()
        self._senders: OrderedDict[tuple[str, str], RefusedSender] = OrderedDict()

    def check_token(self, authorization: str) -> str:
        """The user of a token, "" where none is required. Raises RequestError."""
        if not self.tokens:
            return ""
        user = self.tokens.find_user(authorization)
        if user is None:
            raise RequestError(HTTPStatus.UNAUTHORIZED, "expected a bearer token of [gateway] token_file")
        return user

    def store(self, body: bytes, form: str, protocol: str) -> None:
        """Returns when a checked request is durable. Raises RequestError."""
        try:
            self.intake.store(body, form, self._origin, self._clock(), self.local)
        except TooLarge as error:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        except Overloaded as error:
            status = HTTPStatus.TOO_MANY_REQUESTS if error.busy else HTTPStatus.SERVICE_UNAVAILABLE
            raise RequestError(status, str(error)) from error
        with self._lock:
            self._accepted[form, protocol] += 1

    def record_refusal(self, sender: str, status: HTTPStatus, why: str) -> None:
        """Counts a refusal. sender: its address, and its user if the token was valid."""
        reason = REASONS[status]
        with self._lock:
            self._refused[reason] += 1
            known = self._senders.pop((sender, reason), None) or RefusedSender(sender, reason, "", 0, 0)
            known.why, known.count, known.last = clean_text(why, _MAX_WHY), known.count + 1, self._clock()
            self._senders[sender, reason] = known
            while len(self._senders) > MAX_SENDERS:
                self._senders.popitem(last=False)

    def list_refused(self) -> list[dict[str, Any]]:
        """Refused senders, newest refusal first."""
        with self._lock:
            found = list(self._senders.values())[::-1]
            return [
                {"sender": s.sender, "reason": s.reason, "why": s.why, "count": s.count, "last": iso(s.last)}
                for s in found
            ]

    def format_metrics(self) -> str:
        """The receiver's metrics, as Prometheus text."""
        with self._lock:
            accepted, refused = Counter(self._accepted), Counter(self._refused)
        kinds = [(form, protocol) for form, protocols in PROTOCOLS.items() for protocol in protocols]
        lines = [
            "# HELP fleetpulse_gateway_accepted_total Requests that are durable, by format and protocol.",
            "# TYPE fleetpulse_gateway_accepted_total counter",
            *(
                f'fleetpulse_gateway_accepted_total{{format="{form}",protocol="{protocol}"}} {accepted[form, protocol]}'
                for form, protocol in kinds
            ),
            "# HELP fleetpulse_gateway_refused_total Refused requests, by reason; GET /senders has the senders.",
            "# TYPE fleetpulse_gateway_refused_total counter",
            *(f'fleetpulse_gateway_refused_total{{reason="{r}"}} {refused[r]}' for r in sorted(REASONS.values())),
            "# HELP fleetpulse_gateway_stored_total Requests written to the spool.",
            "# TYPE fleetpulse_gateway_stored_total counter",
            f"fleetpulse_gateway_stored_total {self.intake.stored}",
            "# HELP fleetpulse_gateway_repeated_total Requests that were already stored when they were sent again.",
            "# TYPE fleetpulse_gateway_repeated_total counter",
            f"fleetpulse_gateway_repeated_total {self.intake.repeated}",
        ]
        return "\n".join(lines) + "\n"


def check_otlp(body: bytes) -> None:
    """Raises RequestError unless the body has resources and scopes; the pipeline checks their content."""
    try:
        for resource in ProtobufMessage(body).messages(1):
            resource.messages(2)
    except MalformedMessage as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"not an OTLP metrics request: {error}") from error


def check_remote_write(body: bytes, form: str) -> dict[str, str]:
    """Headers with the written counts, which version 2.0 requires. Raises RequestError."""
    second = form == V2_FORMAT
    samples = histograms = 0
    try:
        for series in ProtobufMessage(body).messages(5 if second else 1):
            samples += series.count(2)
            histograms += series.count(3 if second else 4)
    except MalformedMessage as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"not a remote write request: {error}") from error
    if not second:
        return {}
    counts = {"Samples": samples, "Histograms": histograms, "Exemplars": 0}
    return {f"X-Prometheus-Remote-Write-{what}-Written": str(n) for what, n in counts.items()}
