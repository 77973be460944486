"""What can be wrong with the brokers, and which error of the Kafka client means which of it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Literal

from pipeline.config.sections import Kafka

Kind = Literal["unreachable", "credential", "certificate", "protocol", "forbidden", "missing topic"]

UNREACHABLE = "start the broker, or mend [kafka] bootstrap_servers"
CREDENTIAL = "mend [kafka] username and password_file, or the user on the brokers"
PROTOCOL = "mend [kafka] security_protocol: it must be that of the listener at this address"
FORBIDDEN = "give our user the rights that docs/kafka.md lists"
MISSING = "fleetpulse init"
OUR_CERTIFICATE = "mend [kafka] certificate_file and key_file: the brokers take only certificates that they trust"

_ALERTS = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")
_NAME_MISMATCH = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the brokers cannot be used: what was found, and the mend."""

    kind: Kind
    text: str
    mend: str

    def __str__(self) -> str:
        return f"{self.text}; {self.mend}"


def of_tls(error: BaseException, where: str) -> Trouble | None:
    """What a failed TLS handshake means; None if it is none or the error does not tell."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME_MISMATCH:
            mend = "name the broker in [kafka] bootstrap_servers as its certificate does, or add the name there"
        else:
            mend = "mend [kafka] ca_file: it must hold the authority that signed the broker's certificate"
        return Trouble(
            "certificate", f"{where}: the broker's certificate is refused: {error.verify_message.rstrip('.')}", mend
        )
    if isinstance(error, ssl.SSLError) and any(alert in (error.reason or "") for alert in _ALERTS):
        return Trouble("certificate", f"{where}: the broker refuses our certificate, or wants one", OUR_CERTIFICATE)
    if isinstance(error, ssl.SSLError) and error.library in ("X509", "PEM"):
        mend = "mend [kafka] ca_file, certificate_file and key_file: wanted PEM files that belong together"
        why = (error.reason or str(error)).replace("_", " ").lower()
        return Trouble("certificate", f"{where}: our certificate files cannot be used: {why}", mend)
    return None


def of_error(kafka: Kafka, error: BaseException) -> Trouble | None:
    """What an error of the Kafka client means; None if it does not tell: most of its errors only say "disconnected"."""
    from kafka import errors  # only where Kafka is in force: the client is not light

    where = f"kafka {kafka.bootstrap_servers}"
    for cause in _chain(error):
        if found := of_tls(cause, where):
            return found
    if isinstance(error, errors.SaslAuthenticationFailedError):
        return Trouble("credential", f"{where}: user {kafka.username!r} is refused", CREDENTIAL)
    if isinstance(error, errors.IllegalSaslStateError | errors.UnsupportedSaslMechanismError):
        return Trouble("protocol", f"{where}: {error.description}", PROTOCOL)
    if isinstance(error, errors.AuthorizationError):
        what = type(error).__name__.removesuffix("AuthorizationFailedError").lower()
        which = f"the {what or 'cluster'}{f' {error.args[0]}' if error.args else ''}"
        text = f"{where}: user {kafka.username or 'ANONYMOUS'!r} lacks rights on {which}"
        return Trouble("forbidden", text, FORBIDDEN)
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return Trouble("missing topic", f"{where}: a topic is missing", MISSING)
    text = str(error)
    if "ECONNREFUSED" in text:
        return Trouble("unreachable", f"{where}: connection refused", UNREACHABLE)
    if "DNS" in text:
        return Trouble("unreachable", f"{where}: the name does not resolve", UNREACHABLE)
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what led to it, at most 5 deep: chosen, the client wraps once."""
    found = [error]
    while len(found) < 5 and (below := found[-1].__cause__ or found[-1].__context__):
        found.append(below)
    return found
