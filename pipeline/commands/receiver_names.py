"""Receivers that the configuration names in routes and in steps of escalation exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from pipeline.commands.installed import is_node
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError


def check_receivers(config: Config) -> None:
    """Raises ConfigError if a step of escalation or a route names no receiver.

    Routes are checked where the pipeline's packages are installed: a node has none of them. Secrets are not read, as
    the person who checks may have no right to.
    """
    known = [one.name for one in config.notify.receivers]
    for number, step in enumerate(config.incidents.escalation):
        for name in step.receivers:
            if name not in known:
                where = f"{config.source}: [[incidents.escalation]] {number + 1}: receivers = {list(step.receivers)!r}"
                raise ConfigError(f"{where}: {name!r} is not a receiver; {_describe_known(name, known)}")
    if is_node():
        return
    from pipeline.notify.routes import build_rules

    try:
        build_rules(config.notify)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def _describe_known(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known)) or 'none, see docs/receivers.md'}"
