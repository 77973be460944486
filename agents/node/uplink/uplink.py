"""How spooled messages leave the node: the pipeline reads the spool itself, or a SpoolSender sends it to Kafka."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from agents.node.spool.disk import FileWriter, ImmediateFileWriter
from pipeline.config.sections import Config
from pipeline.transport import segments

if TYPE_CHECKING:
    from agents.node.uplink.sender import SpoolSender

READERS = {"spool": "pipeline", "kafka": "kafka"}
"""The reader whose cursor file lets a spool's writer unlink segments, by transport."""


def open_uplink(
    config: Config,
    transport: str,
    nodes: Iterable[str],
    log: Callable[[str], object],
    role: str,
    files: FileWriter | None = None,
) -> SpoolSender | None:
    """A SpoolSender for the spools of `nodes`, not yet started; None if the pipeline reads the spools itself.

    files: accesses the spools' disk, if the caller must not wait for it.

    Raises ConfigError on bad credentials.
    """
    nodes = tuple(nodes)
    directory = config.spool.directory
    (files or ImmediateFileWriter()).write_later(directory, lambda: remove_stale_cursors(directory, nodes, transport))
    if transport != "kafka":
        return None
    from agents.node.uplink.sender import SpoolSender  # here, so that an agent without Kafka need not load it
    from agents.node.uplink.streams import CatchUpLimiter

    # a simulation has its own speed
    limiter = CatchUpLimiter(config.kafka.catch_up, config.kafka.jitter) if role == "agent" else CatchUpLimiter()
    return SpoolSender(config.spool.directory, nodes, config.kafka, log, role, limiter=limiter)


def remove_stale_cursors(directory: Path, nodes: Iterable[str], transport: str) -> None:
    """Removes the cursors of the other transport's reader from the spools of `nodes`.

    That reader is not in use; its cursor, which never moves again, would keep every later segment until the size limit.
    If that reader returns, it writes a new cursor.
    """
    stale = [f"{segments.folder_name(reader)}.cursor" for way, reader in READERS.items() if way != transport]
    for node in nodes:
        for home in _list_folders(directory / segments.folder_name(node)):
            for epoch in _list_folders(home):
                for name in stale:
                    with contextlib.suppress(OSError):  # not there; or not ours to remove, which only keeps segments
                        (epoch / name).unlink(missing_ok=True)


def _list_folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:  # no such spool yet, or not readable: opening it reports that
        return []
