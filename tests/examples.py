"""Which examples of a property Hypothesis tries: a fifth in `make test`, all in `make test-all`, new in `make soak`.

Both tests draw the same examples in each run, so that a change fails only by what it changed. The soak draws new ones:
a failure that it finds becomes an explicit example (`@example`) of the property.
"""

from __future__ import annotations

import os

ALL_EXAMPLES = "FLEETPULSE_TEST_ALL_EXAMPLES"
"""Set by `make test-all` and `make soak`."""
_NEW_EXAMPLES = "FLEETPULSE_TEST_NEW_EXAMPLES"  # set by `make soak`
_SHARE = 5
_FEWEST = 5  # fewer would often draw nothing but the simplest values


def examples(count: int) -> int:
    """Returns how many of a property's examples this run tries."""
    return count if os.environ.get(ALL_EXAMPLES) else min(count, max(_FEWEST, count // _SHARE))


def are_fixed() -> bool:
    """Returns whether each run draws the same examples."""
    return not os.environ.get(_NEW_EXAMPLES)
