"""State: all arrays that a simulated fleet keeps between blocks, by name; the content of a snapshot.

Randomness is not part of it: every block has its own generators, so a resumed fleet continues bit for bit.
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
        """Returns all arrays as an .npz file in memory."""
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **self)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Loads the arrays of `save`. Raises UsageError if they belong to another fleet."""
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
