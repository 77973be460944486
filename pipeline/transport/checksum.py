"""CRC32C (Castagnoli) by the processor's own instruction, as the spool's records bear it.

The package `crc32c` is loaded without its `__init__`, which for the sake of a version number and a command line loads
email, zipfile and argparse: 4 MiB, which is a fifteenth of all that the agent may take on a node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

_PACKAGE, _NAME = "crc32c", "crc32c._crc32c"


def _extension() -> Any:
    """The package's compiled module. Raises ImportError where it is not installed."""
    package = PathFinder.find_spec(_PACKAGE)
    if package is None:
        raise ImportError(f"{_PACKAGE} is not installed; wanted for the spool's checksums: pip install crc32c")
    found = PathFinder.find_spec(_NAME, package.submodule_search_locations)
    if found is None or found.loader is None:
        raise ImportError(f"{_NAME} is not in {package.origin}; wanted crc32c 2.7 or newer")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


_loaded = sys.modules.get(_NAME) or _extension()
crc32c: Callable[[Any], int] = _loaded.crc32c
