"""What a pipeline's start refuses, apart from what a single key must be: `config check` and a reload refuse it too."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from pipeline.commands.installed import is_node
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError


def check_receivers(config: Config, secrets: bool = False) -> None:
    """Raises ConfigError if a step of escalation or a route names no receiver, or a receiver can never be called.

    Routes and receivers are checked where the pipeline's packages are installed: a node has none of them. secrets:
    whether those are read too; the person who checks may have no right to.
    """
    known = [one.name for one in config.notify.receivers]
    for number, step in enumerate(config.incidents.escalation):
        for name in step.receivers:
            if name not in known:
                where = f"{config.source}: [[incidents.escalation]] {number + 1}: receivers = {list(step.receivers)!r}"
                raise ConfigError(f"{where}: {name!r} is not a receiver; {_describe_known(name, known)}")
    if is_node():
        return
    from pipeline.notify.receivers import build_endpoints
    from pipeline.notify.routes import build_rules

    try:
        build_endpoints(config.notify.receivers, secrets)
        build_rules(config.notify)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def _describe_known(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known)) or 'none, see docs/receivers.md'}"
