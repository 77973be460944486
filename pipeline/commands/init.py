"""`fleetpulse init`: makes the store, the folders for state and the topics, and says what was there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.config.sections import Config
from pipeline.model.errors import Unreachable, UsageError
from pipeline.runtime import private_files


def init(config: Config, say: Callable[[str], None], acls: bool = False) -> int:
    """Makes what is missing; harmless to repeat, also beside a running pipeline, whose store needs nothing.

    acls: gives the users of agents and pipeline their rights on the brokers, too.
    """
    if acls and config.pipeline.transport != "kafka":
        raise UsageError(f'{config.source}: --acls: there are brokers only with [pipeline] transport = "kafka"')
    _folder(config.spool.directory, "spool", say)
    _folder(config.store.path.parent, "folder of the store", say)
    if config.api.token_file is not None:
        _tokens(config.api.token_file, say)
    _store(config, say)
    if config.pipeline.transport == "kafka":
        from pipeline.commands import init_kafka

        init_kafka.create_topics(config.kafka, say)
    if acls:
        from pipeline.commands import init_kafka

        init_kafka.create_acls(config.kafka, say)
    for warning in private_files.warnings(config):
        say(f"warning: {warning}")
    return 0


def _folder(path: Path, what: str, say: Callable[[str], None]) -> None:
    """State is its owner's business: new folders are closed to others."""
    if path.is_dir():
        say(f"{what}: {path} was there already")
        return
    try:
        private_files.make_folder(path)
    except OSError as error:
        raise UsageError(
            f"{what}: {path} cannot be made: {error.strerror}; wanted a folder that we may write"
        ) from error
    say(f"{what}: {path} made")


def _tokens(path: Path, say: Callable[[str], None]) -> None:
    from pipeline.api import tokens

    try:
        tokens.make(path)
    except FileExistsError:
        say(f"tokens: {path} was there already")
        return
    except OSError as error:
        raise UsageError(
            f"tokens: {path} cannot be made: {error.strerror}; wanted a place that we may write"
        ) from error
    say(f"tokens: {path} made, for {' and '.join(tokens.MADE)}")


def _store(config: Config, say: Callable[[str], None]) -> None:
    from pipeline.store.database import Database

    path, known = config.store.path, config.store.path.exists()
    try:
        Database(path, config.store.memory_limit).close()
    except Unreachable as error:
        if "lock on file" not in str(error):
            raise
        say(f"store: {path} was there already, and is in use: {error}")
        return
    say(f"store: {path} {'was there already; its schema is current' if known else 'made'}")
