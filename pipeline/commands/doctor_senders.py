"""The doctor's checks of other senders' telemetry: the gateway of this configuration, and what the pipeline rejects."""

from __future__ import annotations

import http.client
import json
from typing import Any

from pipeline.commands.checks import Check
from pipeline.config.sections import Config, Gateway
from pipeline.http import certificates, client
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import OTLP
from pipeline.runtime.guides import guide

ANSWER_S = 5.0
"""Longest wait for the gateway (s). Chosen."""
SHOWN = 3
"""Senders and reasons that are named; more are counted."""
FIXES = {
    "token": "give the sender a token of [gateway] token_file, as header 'authorization: Bearer TOKEN'",
    "malformed": "the sender must send protobuf: OTLP to /v1/metrics, Prometheus remote write to /api/v1/write",
    "format": "the sender must send application/x-protobuf, with no compression, gzip or snappy",
    "path": "point the sender to /v1/metrics (OTLP) or /api/v1/write (remote write); only metrics are received",
    "length": "the sender must send a Content-Length: no chunked encoding",
    "too_large": "lower the sender's batch size: send_batch_max_size (Collector), max_samples_per_send (Prometheus)",
    "busy": "the disk of [spool] directory is too slow: iostat -x 1",
    "unavailable": "free the disk of [spool] directory; start the pipeline or Kafka; or raise [gateway] connections",
}
"""Reason of a refusal -> what to do."""
RECENT = f"""
SELECT rule, arg_max(reason, time) AS newest, count(*) AS number
FROM dead_letter WHERE topic = '{OTLP}' AND time > now() - INTERVAL 1 HOUR GROUP BY 1 ORDER BY number DESC, rule
"""
"""Query for rejected messages: (rule, newest reason, number) per rule."""
LOOK = f"fleetpulse sql \"SELECT time, partition, reason FROM dead_letter WHERE topic = '{OTLP}'\"; {guide('otlp.md')}"


def check_gateway(config: Config) -> Check:
    """Checks that the gateway is ready and refuses no sender. Without a gateway it is `info`."""
    settings = config.gateway
    where = f"{settings.host}:{settings.port}"
    try:
        ready, problem = _get(settings, "/readyz")
        _, senders = _get(settings, "/senders")
    except (OSError, http.client.HTTPException, ValueError, FleetpulseError) as error:
        return Check("gateway", "info", f"none answers on {where} ({error}); only other senders need one")
    if ready != 200:
        why = "; ".join(map(str, problem.get("reasons", [])))
        return Check("gateway", "fail", f"{where}: {why}", "other senders get 503 and wait", FIXES["unavailable"])
    refused = senders.get("refused", [])
    if not refused:
        return Check("gateway", "ok", f"{where} is ready, and refused no sender since its start")
    named = [f"{s['sender']}: {s['count']} refused, last {s['last'][:19]}Z: {s['why']}" for s in refused[:SHOWN]]
    more = f" (and {len(refused) - SHOWN} more)" if len(refused) > SHOWN else ""
    fixes = list(dict.fromkeys(FIXES.get(s["reason"], f"see {guide('otlp.md')}") for s in refused[:SHOWN]))
    meaning = "what these sent is not stored; they retry only after 429 and 503"
    return Check("gateway", "warn", "; ".join(named) + more, meaning, "; ".join(fixes))


def check_rejected(config: Config) -> Check:
    """Checks that the pipeline rejected nothing of other senders in the last hour."""
    try:
        _, rows, _ = client.query(config, RECENT)
    except FleetpulseError:
        return Check("other senders", "info", "no pipeline answers, which counts what it rejects")
    if not rows:
        return Check("other senders", "ok", "nothing of them was rejected in the last hour")
    named = [f"{number} dead letters, newest: {newest}" for _, newest, number in rows[:SHOWN]]
    more = f" (and {len(rows) - SHOWN} more rules)" if len(rows) > SHOWN else ""
    return Check("other senders", "warn", "; ".join(named) + more, "these values are not stored", LOOK)


def _get(settings: Gateway, path: str) -> tuple[int, Any]:
    """(status, JSON) of a GET of the gateway, with its own first token. Raises OSError, HTTPException, ValueError."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    if settings.certificate_file is None:
        connection = http.client.HTTPConnection(host, settings.port, timeout=ANSWER_S)
    else:
        # the very certificate of this gateway is trusted, under whatever name it is reached here
        context = certificates.trust(settings.certificate_file)
        context.check_hostname = False
        connection = http.client.HTTPSConnection(host, settings.port, timeout=ANSWER_S, context=context)
    token = client.read_token(settings.token_file) if settings.token_file else ""
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
