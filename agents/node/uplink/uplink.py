"""How what is spooled leaves the node: the pipeline reads the spool itself, or a Sender takes it to Kafka."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from agents.node.spool.disk import AtOnce, SmallFiles
from pipeline.config.sections import Config
from pipeline.transport import segments

if TYPE_CHECKING:
    from agents.node.uplink.sender import Sender

READERS = {"spool": "pipeline", "kafka": "kafka"}
"""Whose cursor file lets a spool's writer unlink segments, by transport."""


def open_uplink(
    config: Config,
    transport: str,
    nodes: Iterable[str],
    say: Callable[[str], object],
    role: str,
    files: SmallFiles | None = None,
) -> Sender | None:
    """A Sender for the spools of `nodes`, not yet started; None where the pipeline comes for them itself.

    files: who touches the spools' disk, where the caller must not wait for it.

    Raises ConfigError on bad credentials.
    """
    nodes = tuple(nodes)
    directory = config.spool.directory
    (files or AtOnce()).later(directory, lambda: only_reader(directory, nodes, transport))
    if transport != "kafka":
        return None
    from agents.node.uplink.sender import Sender
    from agents.node.uplink.streams import Pace  # here, so that an agent that only spools need not load them

    pace = Pace(config.kafka.catch_up, config.kafka.jitter) if role == "agent" else Pace()  # a simulation has its own
    return Sender(config.spool.directory, nodes, config.kafka, say, role, pace=pace)


def only_reader(directory: Path, nodes: Iterable[str], transport: str) -> None:
    """Removes the cursors of the other transport's reader from the spools of `nodes`.

    That reader will not come back; its cursor, which never moves again, would hold every later segment until the cap.
    Should it come back all the same, it writes a new one.
    """
    stale = [f"{segments.folder_name(reader)}.cursor" for way, reader in READERS.items() if way != transport]
    for node in nodes:
        for home in _folders(directory / segments.folder_name(node)):
            for epoch in _folders(home):
                for name in stale:
                    with contextlib.suppress(OSError):  # not there; or not ours to remove, which only keeps segments
                        (epoch / name).unlink(missing_ok=True)


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:  # no such spool yet, or one that cannot be listed: opening it tells
        return []
