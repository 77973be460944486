"""State: all that a simulated fleet carries from one block of ticks to the next, by name; what a snapshot holds.

Randomness is not part of it: every block has its own generators, so a resumed fleet continues to the bit.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError


class State(dict[str, NDArray[Any]]):
    """Arrays by name. A model sets the first value of its arrays, and replaces an array to change it."""

    def save(self) -> bytes:
        """All arrays as an .npz file in memory."""
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **self)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Takes the arrays of `save`. Raises UsageError if they are of another fleet."""
        with np.load(io.BytesIO(data), allow_pickle=False) as saved:
            found = {name: saved[name] for name in saved.files}
        wrong = sorted(
            name
            for name in self.keys() | found.keys()
            if name not in self or name not in found or self[name].shape != found[name].shape
        )
        if wrong:
            raise UsageError(
                f"snapshot of a simulated fleet: {', '.join(wrong[:3])}: do not match this fleet; expected a snapshot "
                "of the same scenario and seed, made by the same version"
            )
        self.update(found)
