"""SASL/GSSAPI (Kerberos): logs in with a keytab or the ticket cache of `kinit`, and explains failures.

With a keytab the library (MIT Kerberos) gets a ticket itself and a new one when half of its life is over; no kinit, no
renewal daemon. The Python package `gssapi` is optional (`pip install 'fleetpulse[kerberos]'`).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kafka.net.sasl import register_sasl_mechanism
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import open_regular
from pipeline.transport.broker_errors import CLOCKS, BrokerProblem
from pipeline.transport.oauth_tokens import LoginError

_BASE = -1765328384
"""ERROR_TABLE_BASE_krb5 of MIT Kerberos; protocol errors (RFC 4120 section 7.5.9) are counted from it."""
_UNSIGNED = 1 << 32
_NO_KEY, _NO_CACHE = _BASE + 181, _BASE + 195  # KRB5_KT_NOTFOUND, KRB5_FCC_NOFILE
_EXPIRED, _UNREACHABLE = _BASE + 32, _BASE + 156  # KRB5KRB_AP_ERR_TKT_EXPIRED, KRB5_KDC_UNREACH
TICKETS = "run kinit, or set [kafka] keytab_file and username"
_PRINCIPAL = "correct [kafka] username and keytab_file, or create the principal at the KDC"
_KDC = "start the KDC, or correct /etc/krb5.conf on this host"
_SERVICE = (
    "create the brokers' principal, or correct [kafka] kerberos_service; the host is the broker's name in "
    "bootstrap_servers and advertised.listeners"
)
_PROBLEMS: dict[int, tuple[Any, str, str]] = {
    _BASE + 6: ("credential", "the KDC does not know our principal", _PRINCIPAL),
    _BASE + 7: ("credential", "the KDC does not know the brokers' principal", _SERVICE),
    _BASE + 18: ("credential", "the KDC has revoked or locked our principal", _PRINCIPAL),
    _BASE + 24: ("credential", "the KDC refuses our key", _PRINCIPAL),
    _BASE + 31: ("credential", "the KDC refuses our key", _PRINCIPAL),  # an older key of the principal
    _EXPIRED: ("credential", "our ticket has expired", TICKETS),
    _BASE + 33: ("credential", "our ticket is not valid yet", CLOCKS),
    _BASE + 37: ("credential", "the clocks of this host and the KDC differ too much", CLOCKS),
    _UNREACHABLE: ("login server", "no KDC of the realm responds", _KDC),
    _BASE + 154: ("login server", "the KDC of the realm is not known", _KDC),  # KRB5_REALM_UNKNOWN
    _BASE + 220: ("login server", "the KDC of the realm is not known", _KDC),  # KRB5_REALM_CANT_RESOLVE
    _NO_KEY: ("credential", "the keytab has no key of our principal", _PRINCIPAL),
    _NO_CACHE: ("credential", "there is no ticket cache", TICKETS),
}
"""Minor status of a GSS error -> (kind, text, remedy)."""


class KerberosService(str):
    """Service name of the brokers, as kafka-python expects it, with our own principal and keytab."""

    __slots__ = ("keytab", "principal")
    principal: str
    keytab: Path | None

    @classmethod
    def from_config(cls, kafka: Kafka) -> KerberosService:
        """The service of a configuration."""
        made = cls(kafka.kerberos_service)
        made.principal, made.keytab = kafka.username, kafka.keytab_file
        return made

    def acquire(self) -> Any:
        """Credentials of our principal. Raises gssapi's GSSError."""
        import gssapi

        name = gssapi.Name(self.principal, gssapi.NameType.kerberos_principal) if self.principal else None
        store = {"client_keytab": f"FILE:{self.keytab}", "ccache": f"MEMORY:{self.principal} {self.keytab}"}
        return gssapi.Credentials(name=name, usage="initiate", store=store if self.keytab is not None else None)


class KerberosLogin(SaslMechanismGSSAPI):  # type: ignore[misc] # kafka-python ships no types
    """kafka-python's GSSAPI with credentials of a keytab, and errors that say which side failed."""

    def __init__(self, **config: Any) -> None:
        """Raises LoginError if there is no ticket for the brokers."""
        import gssapi

        self._is_done = self._is_authenticated = False
        service = config["sasl_kerberos_service_name"]
        self.auth_id = f"{service}@{config['host']}"
        try:
            name = gssapi.Name(self.auth_id, name_type=gssapi.NameType.hostbased_service)
            self.gssapi_name = name.canonicalize(gssapi.MechType.kerberos)
            credentials = service.acquire() if isinstance(service, KerberosService) else None
            self._client_ctx = gssapi.SecurityContext(name=self.gssapi_name, usage="initiate", creds=credentials)
            self._next_token = self._client_ctx.step(None)
        except gssapi.exceptions.GSSError as error:
            raise LoginError(explain_gss_error(error, service, config["host"])) from None

    def receive(self, auth_bytes: bytes) -> None:
        """See `SaslMechanism.receive`. Raises LoginError if the broker does not prove that it is the service."""
        import gssapi

        try:
            super().receive(auth_bytes)
        except gssapi.exceptions.GSSError as error:
            text = f"Kerberos: the broker's response is refused: {error}"
            raise LoginError(BrokerProblem("credential", text, _SERVICE)) from None


def explain_gss_error(error: Any, service: str, host: str) -> BrokerProblem:
    """The problem behind a GSSError of our side."""
    code = int(error.min_code)
    code -= _UNSIGNED if code >= _UNSIGNED // 2 else 0
    principal = getattr(service, "principal", "") or "of the ticket cache"
    where = f"Kerberos, principal {principal}, service {service}/{host}"
    if getattr(service, "keytab", None) is not None:  # the library found no key, or got no new ticket with it
        code = {_NO_CACHE: _NO_KEY, _EXPIRED: _UNREACHABLE}.get(code, code)
    kind, text, remedy = _PROBLEMS.get(code, ("credential", "", TICKETS))
    detail = " ".join(str(error).split())
    return BrokerProblem(kind, f"{where}: {text or 'no ticket'} ({detail})", remedy)


def kerberos_settings(kafka: Kafka) -> dict[str, Any]:
    """Keyword arguments of a kafka-python client for GSSAPI. Raises ConfigError."""
    if find_spec("gssapi") is None:
        raise ConfigError(
            "[kafka] sasl_mechanism = 'GSSAPI': the Python package gssapi is not installed; expected it: "
            "pip install 'fleetpulse[kerberos]' (needs the Kerberos libraries, on Debian libkrb5-dev and gcc)"
        )
    if kafka.keytab_file is not None:
        if not kafka.username:
            raise ConfigError("[kafka] keytab_file without username; expected the principal whose key it has")
        try:
            with open_regular(kafka.keytab_file):  # the library opens it by its path, and would wait at a pipe
                pass
        except OSError as error:
            raise ConfigError(
                f"[kafka] keytab_file = {str(kafka.keytab_file)!r}: {error.strerror}; expected a readable file"
            ) from error
    register_sasl_mechanism("GSSAPI", KerberosLogin, overwrite=True)
    return {"sasl_kerberos_service_name": KerberosService.from_config(kafka)}


def describe_ticket(kafka: Kafka) -> str:
    """Our principal and the remaining life of its ticket, for doctor; the error's text if there is none."""
    import gssapi

    try:
        found = KerberosService.from_config(kafka).acquire()
        return f"principal {found.name}, ticket valid for {found.lifetime} s"
    except gssapi.exceptions.GSSError as error:
        return f"no ticket: {error}"
