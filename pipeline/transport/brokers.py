"""How every client of ours speaks to the brokers of [kafka]: address, backoff, TLS and SASL from the configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError

RECONNECT_MS = 1000
"""Longest pause between two tries to connect. The client's 30 s would leave agents silent for half a minute after a
broker is back (measured: first record 34 s after the broker, 1.2 s with this)."""
REQUEST_MS = 10_000
"""A request without an answer for so long has failed; chosen: a third of the 30 s after which trouble must be seen."""
LOGGER = "kafka"
"""Under which all loggers of the client lie."""


def quiet() -> logging.Logger:
    """The client's logger, tamed: it logs several lines per try to connect, and passwords at DEBUG.

    Nothing of it goes on to our own log; who wants to hear it adds a handler (diagnosis.Causes).
    """
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # without any, logging itself would write to stderr
    return logger


def settings(kafka: Kafka, role: str) -> dict[str, Any]:
    """Keyword arguments of any kafka-python client, whose id ends in `role`. Raises ConfigError on bad credentials."""
    quiet()  # nobody makes a client without these settings
    out: dict[str, Any] = {
        "bootstrap_servers": servers(kafka),
        "client_id": f"fleetpulse-{role}",
        "reconnect_backoff_max_ms": RECONNECT_MS,
        "request_timeout_ms": REQUEST_MS,
        "security_protocol": kafka.security_protocol,
    }
    if kafka.security_protocol.endswith("SSL"):
        out |= _tls(kafka)
    if kafka.security_protocol.startswith("SASL"):
        out |= _sasl(kafka)
    return out


def servers(kafka: Kafka) -> list[str]:
    """Addresses at which the brokers are looked for."""
    return [server.strip() for server in kafka.bootstrap_servers.split(",")]


def files(kafka: Kafka) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file with credentials is written or replaced; None for one that cannot be seen."""
    named = (kafka.password_file, kafka.ca_file, kafka.certificate_file, kafka.key_file)
    return tuple(_mark(path) for path in named if path is not None)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # being replaced; who makes a client hears of it
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tls(kafka: Kafka) -> dict[str, Any]:
    files = {"ca_file": kafka.ca_file, "certificate_file": kafka.certificate_file, "key_file": kafka.key_file}
    for key, path in files.items():
        if path is not None:
            _readable(key, path)
    if (kafka.key_file is None) != (kafka.certificate_file is None):
        raise ConfigError("[kafka] certificate_file and key_file: one without the other; wanted both or neither")
    names = {"ca_file": "ssl_cafile", "certificate_file": "ssl_certfile", "key_file": "ssl_keyfile"}
    return {names[key]: str(path) for key, path in files.items() if path is not None}


def _sasl(kafka: Kafka) -> dict[str, Any]:
    if not kafka.username or kafka.password_file is None:
        raise ConfigError(
            f"[kafka] security_protocol = {kafka.security_protocol!r}: wants username and password_file, "
            f"found username = {kafka.username!r}, password_file = {str(kafka.password_file or '')!r}"
        )
    password = _readable("password_file", kafka.password_file).rstrip("\r\n")
    if not password:
        raise ConfigError(f"[kafka] password_file = {str(kafka.password_file)!r}: is empty; wanted the password in it")
    return {
        "sasl_mechanism": kafka.sasl_mechanism,
        "sasl_plain_username": kafka.username,
        "sasl_plain_password": password,
    }


def _readable(key: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"[kafka] {key} = {str(path)!r}: {why}; wanted a file that we may read") from error
