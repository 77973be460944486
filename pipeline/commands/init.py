"""`fleetpulse init`: creates store, state directories, tokens and topics, and reports what already existed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.config.sections import Config
from pipeline.model.errors import Unreachable, UsageError
from pipeline.runtime import private_files


def initialize(config: Config, say: Callable[[str], None], acls: bool = False) -> int:
    """Creates what is missing. It can be repeated, also while a pipeline runs.

    acls: also grants the users of agents and pipeline their rights on the brokers.
    """
    if acls and config.pipeline.transport != "kafka":
        raise UsageError(f'{config.source}: --acls: requires [pipeline] transport = "kafka"')
    _folder(config.spool.directory, "spool", say)
    _folder(config.store.path.parent, "store directory", say)
    if config.api.token_file is not None:
        _tokens(config.api.token_file, say)
    _store(config, say)
    if config.pipeline.transport == "kafka":
        from pipeline.commands import init_kafka

        init_kafka.create_topics(config.kafka, say)
    if acls:
        from pipeline.commands import init_kafka

        init_kafka.create_acls(config.kafka, say)
    for warning in private_files.list_warnings(config):
        say(f"warning: {warning}")
    return 0


def _folder(path: Path, what: str, say: Callable[[str], None]) -> None:
    """Creates a directory that other users cannot access."""
    if path.is_dir():
        say(f"{what}: {path} already exists")
        return
    try:
        private_files.make_folder(path)
    except OSError as error:
        raise UsageError(
            f"{what}: {path} cannot be created: {error.strerror}; expected a writable directory"
        ) from error
    say(f"{what}: {path} created")


def _tokens(path: Path, say: Callable[[str], None]) -> None:
    from pipeline.api import tokens

    try:
        tokens.create_token_file(path)
    except FileExistsError:
        say(f"tokens: {path} already exists")
        return
    except OSError as error:
        raise UsageError(f"tokens: {path} cannot be created: {error.strerror}; expected a writable location") from error
    say(f"tokens: {path} created, for {' and '.join(tokens.INITIAL_USERS)}")


def _store(config: Config, say: Callable[[str], None]) -> None:
    from pipeline.store.database import Database

    path, known = config.store.path, config.store.path.exists()
    try:
        Database(path, config.store.memory_limit).close()
    except Unreachable as error:
        if "lock on file" not in str(error):
            raise
        say(f"store: {path} already exists and is in use: {error}")
        return
    say(f"store: {path} {'already exists; its schema is current' if known else 'created'}")
