"""What a pipeline's start refuses, apart from what a single key must be: `config check` and a reload refuse it too."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection
from pathlib import Path

from pipeline.commands.installed import is_node
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config
from pipeline.config.topology import OWN
from pipeline.http.open_pages import describe_open_pages
from pipeline.model.errors import ConfigError
from pipeline.runtime.credentials import is_copy, list_handed_out
from pipeline.runtime.guides import guide
from pipeline.runtime.private_files import is_absent
from pipeline.runtime.systemd import CREDENTIALS

HANDED_OUT = CREDENTIALS / "fleetpulse-pipeline.service" / "tokens"
"""The API's tokens, where the pipeline's unit gives them to it."""


def check_receivers(config: Config, secrets: bool = False) -> None:
    """Raises ConfigError if a step of escalation or a route names no receiver, or a receiver can never be called.

    Only where the pipeline's packages are installed: a node calls no receiver, and a group of the server may be the
    only one that has them. secrets: whether those are read too; the person who checks may have no right to.
    """
    if is_node():
        return
    known = [one.name for one in config.notify.receivers]
    for number, step in enumerate(config.incidents.escalation):
        for name in step.receivers:
            if name not in known:
                where = f"{config.source}: [[incidents.escalation]] {number + 1}: receivers = {list(step.receivers)!r}"
                raise ConfigError(f"{where}: {name!r} is not a receiver; {_describe_known(name, known)}")
    from pipeline.notify.receivers import build_endpoints
    from pipeline.notify.routes import build_rules

    try:
        build_endpoints(config.notify.receivers, secrets)
        build_rules(config.notify)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def check_listeners(config: Config) -> None:
    """Raises ConfigError if API, gateway or dashboard would listen beyond loopback without a login, which their starts
    refuse. Reads no token_file.

    Only where the pipeline's packages are installed. The pipeline's unit may hand out the API's tokens. The API also
    takes tokens with roles, which are beside the store: where this user cannot look there, as in a container that only
    checks, there may be some.
    """
    if is_node():
        return
    from pipeline.api.tokens import check_users, find_role_file, load_role_tokens

    try:
        none = config.api.token_file is None and HANDED_OUT not in list_handed_out()
        if none and _is_readable(roles := find_role_file(config.store.path)):
            check_users(config.api, "api", bool(load_role_tokens(roles)))
        check_users(config.gateway, "gateway", config.gateway.token_file is not None)
        if open_pages := describe_open_pages(config):
            raise ConfigError(open_pages)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def check_advice(config: Config) -> None:
    """Raises ConfigError if the site's advice is wrong or missing, which a start and a reload refuse.

    Only where the pipeline's packages are installed. Not where this user cannot look.
    """
    from pipeline.incidents.advice import read_advice

    path = config.incidents.advice_file
    if path is None or is_node() or not _is_readable(path):
        return
    try:
        read_advice(path)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def find_missing_secrets(config: Config) -> list[tuple[Path, str]]:
    """Returns the files of secrets that are not there, with their keys: a start refuses them. A copy that systemd makes
    exists only while its unit runs, and what this user may not look for may be there."""
    if is_node():
        return []
    found = [(f"[[{one.section}]] {one.name}", one) for one in config.notify.receivers]
    files = [
        (path, f"{where}: {field.name}")
        for where, one in (*found, ("[api]", config.api))
        for field in dataclasses.fields(one)
        if field.name.endswith("_file") and isinstance(path := getattr(one, field.name), Path)
    ]
    return [(path, key) for path, key in files if not is_copy(path) and is_absent(path)]


def _is_readable(path: Path) -> bool:
    """Returns whether this user can read what a file contains, or that there is none."""
    return os.access(path, os.R_OK) if path.exists() else os.access(path.parent, os.X_OK)


def check_next_start(now: Config, fresh: Config, address: tuple[str, int]) -> None:
    """Raises ConfigError or UsageError if a start with `fresh` would end with exit code 2. Reads secrets.

    address: where the API of this process, which runs with `now`, listens until then.
    """
    from pipeline.api.server import check_listen
    from pipeline.api.tokens import find_role_file, read_tokens
    from pipeline.incidents.advice import read_advice

    check_with_origin(fresh, lambda one: check_receivers(one, secrets=True))
    if fresh.incidents.advice_file is not None:
        read_advice(fresh.incidents.advice_file)
    if fresh.pipeline.transport == "kafka":
        from pipeline.transport.kafka_clients import client_settings

        client_settings(fresh.kafka, "pipeline")
    if fresh.topology != now.topology:
        _check_topology(fresh)
    read_tokens(fresh.api, roles=find_role_file(fresh.store.path))
    if (fresh.api.host, fresh.api.port) != (now.api.host, now.api.port):
        check_listen(fresh.api, address)


def _check_topology(config: Config) -> None:
    """Raises UsageError if [topology] path cannot be read, which ends a start; other sources do not."""
    from pipeline.commands.site_reload import list_settings
    from pipeline.topology.site import read_source

    for setting in list_settings(config.topology):
        if setting.name == OWN:
            read_source(setting)


def _describe_known(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known)) or 'none, see ' + guide('receivers.md')}"
