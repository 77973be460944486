"""Arrays with one cell per entity: they grow together, and a restored set must have one length.

Compiled loops do not check lengths and would write out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_one_length(arrays: Mapping[str, Any]) -> None:
    """Raises ValueError unless arrays of one cell per entity, the last axis, are of one length."""
    lengths = {name: np.shape(cells)[-1:] for name, cells in arrays.items() if isinstance(cells, np.ndarray)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays of one length wanted, not {lengths}")


def check_axes(state: Any, blank: Any, name: str) -> None:
    """Raises ValueError where an array has other axes than that of a fresh piece; an axis of 0 there may have grown."""
    if isinstance(blank, np.ndarray):
        axes, wanted = np.shape(state), blank.shape
        if len(axes) != len(wanted) or any(w not in (0, a) for a, w in zip(axes, wanted, strict=True)):
            raise ValueError(f"{name}: {wanted} wanted, not {axes}; 0 stands for any number")
    elif isinstance(blank, dict) and isinstance(state, Mapping):
        for key in blank.keys() & state.keys():
            check_axes(state[key], blank[key], f"{name}.{key}")


def grown(array: NDArray[Any], size: int, fill: float) -> NDArray[Any]:
    """The array, lengthened to at least `size`."""
    if len(array) >= size:
        return array
    new = np.full(size, fill, array.dtype)
    new[: len(array)] = array
    return new
