"""Runs: messages of one sender that a transaction accepts together, although others lie between them.

Most telemetry concerns only its sender: accepted in any order of the senders, the same is stored. What concerns other
senders too, such as an event, a new layout or a claim, comes alone, after all before it and before all after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pipeline.ingest.messages import Item
from pipeline.store.gaps import Sender


def join_runs(
    items: Iterable[Item], find_sender: Callable[[Item], Sender | None]
) -> Iterator[tuple[Sender | None, list[Item]]]:
    """Yields (sender, its messages in their order), or (None, a message that comes alone).

    find_sender: returns None for what comes alone; it is asked after all before that is yielded.
    """
    runs: dict[Sender, list[Item]] = {}
    for item in items:
        sender = find_sender(item)
        if sender is None:
            yield from runs.items()
            runs = {}
            yield None, [item]
        elif sender in runs:
            runs[sender].append(item)
        else:
            runs[sender] = [item]
    yield from runs.items()
