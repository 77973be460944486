"""replica_digest: 64 bits that say whether two ranks hold the same parameters, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_MASK = (1 << 64) - 1
_NEXT = 0x9E3779B97F4A7C15
"""What the sum so far is multiplied by before the next array is added, so that the order of arrays counts: odd, so that
nothing is lost, with bits all over (2^64 over the golden ratio, as in Fibonacci hashing, Knuth vol. 3, 6.4)."""


def replica_digest(arrays: Any) -> int:
    """A digest of one array, or of many in their order: NumPy arrays, PyTorch tensors or what NumPy makes arrays of.

    Each array is the sum of its bits taken as 64-bit words, modulo 2^64: one changed word always changes it; changes
    that cancel exactly, such as two words that were swapped, are not seen. Tensors are summed on their device, and 8
    bytes come back. The bits count, not the numbers: 0.0 and -0.0 differ.
    """
    torch = sys.modules.get("torch")  # who passes tensors has loaded it
    many: Iterable[Any] = (arrays,) if hasattr(arrays, "dtype") else arrays
    total: Any = 0
    for array in many:
        word = _tensor(array, torch) if torch is not None and isinstance(array, torch.Tensor) else _array(array)
        total = _added(total, word)
    return int(total) & _MASK


def _added(total: Any, word: Any) -> Any:
    """The sum so far and the next array's, modulo 2^64: Python's numbers, or a tensor as soon as one is among them."""
    if isinstance(total, int) and isinstance(word, int):
        return (total * _NEXT + word) & _MASK
    if isinstance(total, int):
        return word + _signed(total * _NEXT)
    if isinstance(word, int):
        return total * _signed(_NEXT) + _signed(word)
    return total * _signed(_NEXT) + word.to(total.device)


def _signed(value: int) -> int:
    """The same 64 bits as the signed number that torch computes with."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _array(array: Any) -> int:
    import numpy as np  # only who takes digests needs it

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    words = data[:whole]
    if words.ctypes.data % 8:  # a view into the middle of a buffer
        words = words.copy()
    total = int(words.view(np.uint64).sum(dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & _MASK


def _tensor(tensor: Any, torch: Any) -> Any:
    """The sum as a tensor of one int64 on the same device; nothing is copied to the host."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    if words.storage_offset() % 8:  # a view into the middle of a buffer
        words = words.clone()
    total = words.view(torch.int64).sum()
    for place, rest in enumerate(range(whole, data.numel())):
        total = total + (data[rest].to(torch.int64) << (8 * place))
    return total
