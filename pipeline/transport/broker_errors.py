"""Problems with the brokers, and which error of kafka-python means which problem."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Literal

from pipeline.config.sections import Kafka
from pipeline.runtime.guides import guide

Kind = Literal[
    "unreachable", "replicas", "login server", "credential", "certificate", "protocol", "forbidden", "missing topic"
]
"""replicas: fewer in sync than a topic requires.  login server: a token endpoint or KDC that cannot be used."""

UNREACHABLE = "start the broker, or correct [kafka] bootstrap_servers"
CREDENTIAL = "correct [kafka] username and password_file, or the user on the brokers"
TOKEN = "compare issuer and audience with the brokers' sasl.oauthbearer settings, and the clocks of all hosts"
TICKET = "compare the brokers' principal and keytab with those of the KDC, and the clocks of all hosts"
CLOCKS = "timedatectl  # on this host, the login server and the brokers: are the clocks synchronized?"
PROTOCOL = "correct [kafka] security_protocol: it must be that of the listener at this address"
FORBIDDEN = f"grant our user the rights listed in {guide('kafka.md')}"
MISSING = "fleetpulse init"
REPLICAS = "start the brokers that hold the other replicas; until then the brokers refuse messages"
OUR_CERTIFICATE = "correct [kafka] certificate_file and key_file: the brokers accept only certificates that they trust"

_ALERTS = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")
_NAME_MISMATCH = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


@dataclass(frozen=True, slots=True)
class BrokerProblem:
    """Why the brokers cannot be used: the finding and the remedy."""

    kind: Kind
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def classify_tls_error(error: BaseException, where: str, ca_key: str = "ca_file") -> BrokerProblem | None:
    """The problem behind a failed TLS handshake; None for other errors. ca_key: the key of [kafka] with the CA."""
    server = "broker" if ca_key == "ca_file" else "server"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME_MISMATCH:
            key = "bootstrap_servers" if server == "broker" else "token_endpoint"
            remedy = f"name the {server} in [kafka] {key} as its certificate does, or add the name there"
        else:
            remedy = f"correct [kafka] {ca_key}: it must contain the CA that signed the {server}'s certificate"
        return BrokerProblem(
            "certificate", f"{where}: the {server}'s certificate is refused: {error.verify_message.rstrip('.')}", remedy
        )
    if isinstance(error, ssl.SSLError) and any(alert in (error.reason or "") for alert in _ALERTS):
        return BrokerProblem(
            "certificate", f"{where}: the broker refuses our certificate, or requires one", OUR_CERTIFICATE
        )
    if isinstance(error, ssl.SSLError) and error.library in ("X509", "PEM"):
        remedy = "correct [kafka] ca_file, certificate_file and key_file: expected PEM files that belong together"
        why = (error.reason or str(error)).replace("_", " ").lower()
        return BrokerProblem("certificate", f"{where}: our certificate files cannot be used: {why}", remedy)
    return None


def classify_error(kafka: Kafka, error: BaseException) -> BrokerProblem | None:
    """The problem behind an error of the Kafka client; None if unknown: most errors only say "disconnected"."""
    from kafka import errors  # loaded only if Kafka is used: the client is large

    where = f"kafka {kafka.bootstrap_servers}"
    for cause in _causes_of(error):
        if isinstance(problem := getattr(cause, "problem", None), BrokerProblem):  # no token, no ticket
            return problem
        if found := classify_tls_error(cause, where):
            return found
    if isinstance(error, errors.SaslAuthenticationFailedError):
        if kafka.sasl_mechanism in ("OAUTHBEARER", "GSSAPI"):  # a handshake finds which side is wrong
            return None
        return BrokerProblem("credential", f"{where}: user {kafka.username!r} is refused", CREDENTIAL)
    if isinstance(error, errors.IllegalSaslStateError | errors.UnsupportedSaslMechanismError):
        return BrokerProblem("protocol", f"{where}: {error.description}", PROTOCOL)
    if isinstance(error, errors.AuthorizationError):
        what = type(error).__name__.removesuffix("AuthorizationFailedError").lower()
        which = f"the {what or 'cluster'}{f' {error.args[0]}' if error.args else ''}"
        text = f"{where}: user {kafka.username or 'ANONYMOUS'!r} lacks rights on {which}"
        return BrokerProblem("forbidden", text, FORBIDDEN)
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return BrokerProblem("missing topic", f"{where}: a topic is missing", MISSING)
    if isinstance(error, errors.NotEnoughReplicasError | errors.NotEnoughReplicasAfterAppendError):
        text = f"{where}: fewer replicas are in sync than min.insync.replicas of the topic"
        return BrokerProblem("replicas", text, REPLICAS)
    text = str(error)
    if "ECONNREFUSED" in text:
        return BrokerProblem("unreachable", f"{where}: connection refused", UNREACHABLE)
    if "DNS" in text:
        return BrokerProblem("unreachable", f"{where}: the name does not resolve", UNREACHABLE)
    return None


def _causes_of(error: BaseException) -> list[BaseException]:
    """The error and its causes, at most 5; chosen: the client wraps once."""
    found = [error]
    while len(found) < 5 and (below := found[-1].__cause__ or found[-1].__context__):
        found.append(below)
    return found
