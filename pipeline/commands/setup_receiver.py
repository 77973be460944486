"""The receiver of alerts that `fleetpulse setup` configures. Its address goes into a file of its own, mode 0600.

All users may read the configuration, and who knows an address of Slack, Teams or PagerDuty can post there: the key is
in its path. So no address is written into the configuration, whatever it looks like.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.http.addresses import parse_host
from pipeline.model.errors import UsageError
from pipeline.runtime.private_files import open_private
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
    more: tuple[tuple[str, str], ...] = ()

    def write_lines(self, file: Path) -> list[str]:
        """Returns its lines of the configuration. JSON's strings are TOML's."""
        known = (("name", NAME), (self.key, str(file)), *self.more)
        return [f"[[{self.section}]]", *(f"{key} = {json.dumps(value)}" for key, value in known)]


def parse_receiver(address: str) -> SecretReceiver:
    """Returns the receiver of an address. Raises ConfigError or UsageError if nothing can be posted there."""
    from pipeline.notify.delivery import Target, check_url  # loads the HTTP client

    host = parse_host(address)
    section = next((name for pattern, name in _SECTIONS if pattern.fullmatch(host)), "notify.webhooks")
    if section == "notify.pagerduty":
        if (found := _PAGERDUTY_KEY.fullmatch(address)) is None:
            raise UsageError(
                "setup: this address of PagerDuty has no key; expected https://events.pagerduty.com/integration/KEY/"
                "enqueue, or no webhook here and [[notify.pagerduty]] by hand (docs/receivers.md)"
            )
        return SecretReceiver(section, "routing_key_file", found[1], (("region", "eu"),) if ".eu." in host else ())
    check_url(Target(section, NAME, address, key="url_file"))
    return SecretReceiver(section, "url_file", address)


def find_secret_file(configuration: Path) -> Path:
    """Returns the file beside the configuration."""
    return configuration.absolute().parent / f"{NAME}.secret"


def find_copy(file: Path) -> Path:
    """Returns the copy of a secret that systemd makes for the pipeline's unit while it runs."""
    return CREDENTIALS / UNIT / file.name


def write_secret(receiver: SecretReceiver, file: Path, etc: Path | None) -> list[str]:
    """Writes the secret, and below `etc` the drop-in that hands it to the unit. Returns the lines to print."""
    draft = file.with_name(f"{file.name}.new")
    try:
        draft.unlink(missing_ok=True)
        with open(draft, "x", opener=open_private) as secret:
            secret.write(f"{receiver.secret}\n")
        os.replace(draft, file)
        said = [f"receiver: [[{receiver.section}]] {NAME}; its {receiver.key.removesuffix('_file')} is in {file}"]
        if etc is None:
            return said
        drop_in = etc / "systemd/system" / f"{UNIT}.d" / f"{NAME}.conf"
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text(f"[Service]\nLoadCredential={file.name}:{file}\n")
        drop_in.chmod(0o644)
    except OSError as error:
        raise UsageError(f"setup: {error.filename}: {error.strerror}; expected to run as root") from error
    return [*said, f"unit: {drop_in} written"]
