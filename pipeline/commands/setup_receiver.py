"""The receiver of alerts that `fleetpulse setup` configures. Its address goes into a separate file, mode 0600.

All users may read the configuration, and who knows an address of Slack, Teams or PagerDuty can post there: the key is
in its path. So no address is written into the configuration, whatever it looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.commands.setup_files import PreparedFiles
from pipeline.config.files import HOST, list_drop_ins
from pipeline.http.addresses import parse_host
from pipeline.model.errors import ConfigError, UsageError
from pipeline.runtime.guides import guide
from pipeline.runtime.private_files import FILE
from pipeline.runtime.systemd import CREDENTIALS

NAME = "on-call"
UNIT = "fleetpulse-pipeline.service"
_SECTIONS = (
    (re.compile(r"hooks\.slack(-gov)?\.com"), "notify.slack"),
    (re.compile(r".*\.(webhook\.office\.com|logic\.azure\.com|api\.powerplatform\.com)"), "notify.teams"),
    (re.compile(r"events(\.eu)?\.pagerduty\.com"), "notify.pagerduty"),
)
"""Host of an address -> what posts to it in the form that it takes; any other host gets our webhook."""
_PAGERDUTY_KEY = re.compile(r"https://[^/]+/integration/([0-9A-Za-z]{32})(?:/.*)?")


@dataclass(frozen=True, slots=True)
class SecretReceiver:
    """A section, its key that names the file with `secret`, and further keys with values."""

    section: str
    key: str
    secret: str
    more: tuple[tuple[str, str | bool | list[str]], ...] = ()

    def write_lines(self, file: Path) -> list[str]:
        """Returns its lines of the configuration. JSON's strings are TOML's."""
        known = (("name", NAME), (self.key, str(file)), *self.more)
        return [f"[[{self.section}]]", *(f"{key} = {json.dumps(value)}" for key, value in known)]


def parse_receiver(address: str, allow_http: bool = False, networks: Sequence[str] = ()) -> SecretReceiver:
    """Returns the receiver of an address. Raises ConfigError or UsageError if nothing can be posted there.

    allow_http: it may be http.   networks: private ones in which it may be, as CIDRs.
    """
    from pipeline.notify.delivery import Target, check_receiver  # loads the HTTP client

    host = parse_host(address)
    section = next((name for pattern, name in _SECTIONS if pattern.fullmatch(host)), "notify.webhooks")
    if section == "notify.pagerduty":
        if (found := _PAGERDUTY_KEY.fullmatch(address)) is None:
            raise UsageError(
                "setup: this address of PagerDuty has no key; expected https://events.pagerduty.com/integration/KEY/"
                f"enqueue, or no webhook here and [[notify.pagerduty]] by hand ({guide('receivers.md')})"
            )
        return SecretReceiver(section, "routing_key_file", found[1], (("region", "eu"),) if ".eu." in host else ())
    try:
        check_receiver(Target(section, NAME, address, allow_http, tuple(networks), "url_file"))
    except ConfigError as error:
        flags = "; flags of setup: --allow-http, --allow-private NETWORK" if "allow_" in str(error) else ""
        raise ConfigError(f"{error}{flags}") from error
    plain = (("allow_http", True),) if address.lower().startswith("http:") and allow_http else ()
    private = (("allow_private", list(networks)),) if networks else ()
    return SecretReceiver(section, "url_file", address, (*plain, *private))


def find_secret_file(configuration: Path) -> Path:
    """Returns the file beside the configuration; each configuration of a folder has its own, also fleetpulse.bak."""
    prefix = "" if configuration.name == HOST.name else f"{configuration.name}."
    return configuration.absolute().parent / f"{prefix}{NAME}.secret"


def find_copy(file: Path) -> Path:
    """Returns the copy of a secret that systemd makes for the pipeline's unit while it runs."""
    return CREDENTIALS / UNIT / file.name


def prepare_secret(files: PreparedFiles, receiver: SecretReceiver, file: Path, etc: Path | None) -> list[str]:
    """Prepares the secret, and below `etc` the drop-in that hands it to the unit. Returns the lines to print."""
    files.prepare(file, f"{receiver.secret}\n".encode(), FILE)
    said = [f"receiver: [[{receiver.section}]] {NAME}; its {receiver.key.removesuffix('_file')} is in {file}"]
    if etc is None:
        return said
    drop_in = _find_drop_in(etc)
    files.prepare(drop_in, f"[Service]\nLoadCredential={file.name}:{file}\n".encode(), 0o644)
    return [*said, f"unit: {drop_in} written"]


def remove_secret(files: PreparedFiles, file: Path, etc: Path, configuration: Path) -> list[str]:
    """Removes the secret and the drop-in of a receiver that is configured no more. Returns the lines to print.

    They stay if a file beside the configuration that is read after it names the copy.
    """
    readers = [
        path for path in list_drop_ins(configuration) if str(find_copy(file)) in path.read_text(errors="replace")
    ]
    if readers:
        return [f"receiver: {file} stays, as {readers[0]} names it"] if file.exists() else []
    stale = [path for path in (_find_drop_in(etc), file) if path.exists()]
    for path in stale:
        files.remove(path)
    return [f"receiver: {path} removed" for path in stale]


def _find_drop_in(etc: Path) -> Path:
    """Returns the drop-in that hands the secret to the unit."""
    return etc / "systemd/system" / f"{UNIT}.d" / f"{NAME}.conf"
