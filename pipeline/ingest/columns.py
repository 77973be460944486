"""Which signals may become columns: a new one widens a table for good, so their number is bounded.

A signal that has its column is always taken, however full the table is: what one sender adds costs no other one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from pipeline.model.errors import Rejected, WireError
from pipeline.model.signals import CLASSES, column_of, signals_of_class
from pipeline.store.schema import RESERVED
from pipeline.transport import wire

MOST_NEW = 512
"""Columns of one class beside those of the catalogue. Chosen: three times the widest class."""
MOST_OF_SENDER = 128
"""New columns that one sender brings until the next start; chosen: four times the signals of a large exporter."""
_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")


class Columns:
    """Checks signals of messages in the order in which they are read. For one thread.

    stored: class -> wire types of the columns that the store has. What a message adds counts from its check on.
    """

    def __init__(self, stored: Callable[[str], Mapping[str, str]]) -> None:
        self._stored = stored
        self._added: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._of_sender: Counter[str] = Counter()

    def check(self, node: str, shape: wire.Shape) -> None:
        """Takes the new signals of a message. Raises WireError if it does not fit, Rejected if they are too many."""
        fresh: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for device_class, _, signals in shape.blocks:
            if device_class not in CLASSES:
                raise WireError(
                    f"device class {device_class!r}: wanted one of {', '.join(CLASSES)}: upgrade the pipeline"
                )
            if len({column_of(name, device_class) for name, _ in signals}) < len(signals):
                raise WireError(f"class {device_class}: two signals would share one column")
            known = {**self._stored(device_class), **self._added[device_class], **fresh[device_class]}
            fresh[device_class] |= _new_columns(device_class, signals, known)
            own = {signal.column for signal in signals_of_class(device_class)}
            if fresh[device_class] and len((known.keys() | fresh[device_class]) - own) > MOST_NEW:
                raise Rejected("signals", f"class {device_class}: more than {MOST_NEW} signals beside the catalogue")
        more = sum(map(len, fresh.values()))
        if more and self._of_sender[node] + more > MOST_OF_SENDER:
            raise Rejected(
                "signals",
                f"{more} new signals beside the {self._of_sender[node]} that sender {node} brought, at most "
                f"{MOST_OF_SENDER} are accepted",
            )
        for device_class, columns in fresh.items():
            self._added[device_class] |= columns
        if more:
            self._of_sender[node] += more


def _new_columns(device_class: str, signals: tuple[tuple[str, str], ...], known: Mapping[str, str]) -> dict[str, str]:
    """Columns that are not known yet. Names must fit for columns, and a signal must have the type of its column."""
    new: dict[str, str] = {}
    for name, code in signals:
        column = column_of(name, device_class)
        wanted = known.get(column)
        if wanted is None and not _NAME.fullmatch(name):
            raise WireError(f"signal {name!r}: wanted lower-case words and dots, at most 64 characters")
        if wanted is not None and wanted != code:
            raise WireError(f"{name}: values of type {code}, wanted {wanted}: senders disagree; upgrade the older side")
        if column in RESERVED:
            raise WireError(f"signal {name!r}: this name is taken by the store")
        if wanted is None:
            new[column] = code
    return new
