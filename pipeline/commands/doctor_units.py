"""The checks of `fleetpulse doctor` on units: whether those run that should, can read their secrets, and which
configuration is in force. A reload that is refused leaves the one of before, and `systemctl reload` succeeds all the
same."""

from __future__ import annotations

import re
from os.path import realpath

from pipeline.commands.checks import Check
from pipeline.config.addresses import hide_in_text
from pipeline.config.files import HOST
from pipeline.config.sections import Config
from pipeline.runtime import systemd
from pipeline.runtime.credentials import list_handed_out
from pipeline.runtime.guides import guide
from pipeline.runtime.reload import read_force
from pipeline.runtime.systemd import CREDENTIALS, HOST_UNITS
from pipeline.runtime.unit_rights import READ, SHARED, Unreadable, find_unreadable, name_variable

SECRETS, IN_FORCE = "unit secrets", "in force"
RELOADED = ("agent", "pipeline", "dashboard")
"""Services that read their configuration again, and show which one is in force."""


def find_down(service: str, meaning: str) -> Check | None:
    """Returns the failure of a unit that should run and does not, with its last reason; None if there is none."""
    if not systemd.is_down(service):
        return None
    unit = f"fleetpulse-{service}"
    fix = f"journalctl -u {unit}; correct what it says, then systemctl restart {unit}"
    fix += f"; to keep it off: systemctl disable --now {unit}"
    return Check(service, "fail", hide_in_text(systemd.explain_end(service)), meaning, fix)


def check_executor(_: Config) -> Check:
    """Checks that the executor runs, where its unit is enabled. Nothing else here says that it does not."""
    if fault := find_down("executor", "approved acts are not carried out"):
        return fault
    if systemd.is_running("executor"):
        return Check("executor", "ok", "its unit runs")
    return Check("executor", "info", "no unit of it should run here")


def check_unit_secrets(config: Config) -> Check | list[Check]:
    """Checks that the user of each unit that should run here can read the secret files that the service reads."""
    services = [service for service in READ if systemd.is_expected(service) and systemd.has_unit(service)]
    if not services or not _is_theirs(config):
        return Check(SECRETS, "info", _explain_none(config, bool(services)))
    found = [one for service in services for one in find_unreadable(config, service)]
    checks = [_describe_unreadable(one) for one in found]
    return checks or Check(SECRETS, "ok", f"readable by the units of {', '.join(services)}")


def _describe_unreadable(one: Unreadable) -> Check:
    unit = f"fleetpulse-{one.service}.service"
    copy = CREDENTIALS / unit / one.path.name
    drop_in = HOST_UNITS / f"{unit}.d" / "secrets.conf"
    handed_out = list_handed_out().get(one.path)
    source = handed_out.file if handed_out else one.path
    found = f"{one.key} = '{one.path}': the user of {unit} cannot read it"
    meaning = f"a reload of the {one.service} is refused, and after a stop it does not start"
    lines, key, more = f"LoadCredential={one.path.name}:{source}", f'the key: "{copy}"', guide("security.md", "Secrets")
    if one.key.partition(".")[0] in SHARED:
        lines += f" and Environment={name_variable(one.key)}={copy}"
        key, more = "the key stays as it is, for the other units", guide("kafka.md", "Login")
    fix = (
        f"{lines} below [Service] in {drop_in}; {key}; then systemctl daemon-reload && systemctl restart "
        f"fleetpulse-{one.service} ({more})"
    )
    if one.owner:
        fix = f"chown {one.owner} {one.path.parent}/*.key"
    return Check(SECRETS, "fail", found, meaning, fix)


def check_in_force(config: Config) -> Check | list[Check]:
    """Asks systemd which configuration the running services have by their status, and whether they refused another."""
    running = [service for service in RELOADED if systemd.is_running(service)]
    if not running or not _is_theirs(config):
        return Check(IN_FORCE, "info", _explain_none(config, bool(running)))
    told = {service: read_force(systemd.read_status(service)) for service in running}
    faults = [fault for service, state in told.items() if (fault := _find_fault(service, *state, config))]
    if faults:
        return faults
    if silent := [service for service, (digest, _) in told.items() if not digest]:
        return Check(
            IN_FORCE, "info", f"{', '.join(silent)}: does not say which it has; it starts, or is of an older version"
        )
    return Check(IN_FORCE, "ok", f"{', '.join(running)}: run with {config.source} as it is now")


def _find_fault(service: str, digest: str, refused: str, config: Config) -> Check | None:
    meaning = f"the {service} runs with the configuration of before: what was changed since is not in force"
    if refused:
        fix = _suggest_after_refusal(service, refused)
        return Check(IN_FORCE, "fail", f"{service}: the last reload was refused: {refused}", meaning, fix)
    if digest and digest != config.digest:
        found = f"{service}: {config.source} or a file of its conf.d was changed after it was read"
        return Check(IN_FORCE, "warn", found, meaning, f"systemctl reload fleetpulse-{service}; doctor then says more")
    return None


def _suggest_after_refusal(service: str, refused: str) -> str:
    """Returns what puts a refused configuration in force. A reload makes no copies and takes no other name of the site:
    where that was asked for, nothing is wrong but the reload."""
    restart = f"systemctl restart fleetpulse-{service}"
    if f"restart the {service} for that" in refused:
        return f"{restart}: a reload cannot change it"
    folder = CREDENTIALS / f"fleetpulse-{service}.service"
    named = re.search(rf"{re.escape(str(folder))}/([^\s'\":;,]+)", refused)
    if named is None:
        return f"correct that, then systemctl reload fleetpulse-{service}"
    handed_out = list_handed_out().get(folder / named[1])
    restart = f"systemctl daemon-reload && {restart}: a reload makes no copies"
    if handed_out is None:
        drop_in = HOST_UNITS / f"{folder.name}.d" / "secrets.conf"
        return f"LoadCredential={named[1]}:FILE below [Service] in {drop_in}; then {restart}"
    return f"correct {handed_out.file}, then {restart}" if (folder / named[1]).exists() else restart


def _is_theirs(config: Config) -> bool:
    """Returns whether this is the configuration that the units read."""
    return realpath(config.source) == realpath(HOST)


def _explain_none(config: Config, has_units: bool) -> str:
    return f"the units read {HOST}, not {config.source}" if has_units else "no unit runs here"
