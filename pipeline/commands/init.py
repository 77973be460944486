"""`fleetpulse init`: creates store, state directories, tokens and topics, and reports what already existed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.config.sections import Config
from pipeline.model.errors import HeldStore, UsageError
from pipeline.runtime import private_files
from pipeline.store.database import Database  # nodes have no store: there this fails before anything is created


def initialize(config: Config, print_line: Callable[[str], None], acls: bool = False) -> int:
    """Creates missing files and folders. It can be repeated, also while a pipeline runs.

    acls: also grants the users of agents and pipeline their rights on the brokers.
    """
    if acls and config.pipeline.transport != "kafka":
        raise UsageError(f'{config.source}: --acls: requires [pipeline] transport = "kafka"')
    _folder(config.spool.directory, "spool", print_line)
    _folder(config.store.path.parent, "store directory", print_line)
    if config.api.token_file is not None:
        _tokens(config.api.token_file, print_line)
    _store(config, print_line)
    owner = private_files.give_to_owner(config.store.path)
    if owner is not None:
        print_line(f"store: {config.store.path} belongs to the owner of its folder (uid {owner})")
    if config.pipeline.transport == "kafka":
        from pipeline.commands import init_kafka

        init_kafka.create_topics(config.kafka, print_line)
    if acls:
        from pipeline.commands import init_kafka

        init_kafka.create_acls(config.kafka, print_line)
    for warning in private_files.list_warnings(config):
        print_line(f"warning: {warning}")
    return 0


def _folder(path: Path, what: str, print_line: Callable[[str], None]) -> None:
    """Creates a directory that other users cannot access."""
    if path.is_dir():
        print_line(f"{what}: {path} already exists")
        return
    try:
        private_files.make_folder(path)
    except OSError as error:
        raise UsageError(
            f"{what}: {path} cannot be created: {error.strerror}; expected a writable directory"
        ) from error
    print_line(f"{what}: {path} created")


def _tokens(path: Path, print_line: Callable[[str], None]) -> None:
    from pipeline.api import tokens

    try:
        tokens.create_token_file(path)
    except FileExistsError:
        print_line(f"tokens: {path} already exists")
        return
    except OSError as error:
        raise UsageError(f"tokens: {path} cannot be created: {error.strerror}; expected a writable location") from error
    print_line(f"tokens: {path} created, for {' and '.join(tokens.INITIAL_USERS)}")


def _store(config: Config, print_line: Callable[[str], None]) -> None:
    path, known = config.store.path, config.store.path.exists()
    try:
        Database(path, config.store.memory_limit, keep_older=config.store.migration_backup).close()
    except HeldStore as error:  # by a pipeline that runs, which is no reason to stop it
        print_line(f"store: {path} already exists; {error.holder} has it open")
        return
    print_line(f"store: {path} {'already exists; its schema is current' if known else 'created'}")
