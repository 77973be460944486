"""Joined batches as one batch per tick, for tests about ticks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from pipeline.model.records import Batch, Block


def split_ticks(batches: Iterable[Batch]) -> list[Batch]:
    """Returns one batch per tick, with one block per class and list of entities."""
    found = []
    for batch in batches:
        for tick in range(len(batch.times)):
            blocks: dict[tuple[str, tuple[str, ...]], dict[str, NDArray[Any]]] = {}
            for block in batch.blocks:
                own = tuple(range(len(batch.times))) if block.ticks is None else block.ticks
                if tick in own:
                    row = own.index(tick)
                    columns = {name: values[row : row + 1] for name, values in block.columns.items()}
                    blocks.setdefault((block.device_class, block.entities), {}).update(columns)
            made = tuple(Block(c, entities, columns) for (c, entities), columns in blocks.items())
            found.append(Batch(batch.origin, batch.times[tick : tick + 1], made))
    return found
