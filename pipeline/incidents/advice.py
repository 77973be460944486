"""What to do about an incident, and where its runbook is: the shipped advice.toml, overridden by a file of the site.

The site's file replaces single keys, and is read again when it changes. One that cannot be read is an error at the
start; later it is logged, and the last valid text stays in force.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular_text
from pipeline.model.toml_text import parse_toml
from pipeline.model.topology import kind_of

log = logging.getLogger("fleetpulse.advice")
SHIPPED = Path(__file__).with_name("advice.toml")
KEYS = frozenset({"advice", "runbook"})
SECTIONS = ("detector", "cause")
NOT_OF_CAUSE = frozenset({"alert_storm"})
"""Detectors whose cause says only where they are: a storm is of a site, which need not be affected as a whole."""
ONLY_CAUSE: Mapping[str, frozenset[str] | None] = {
    **dict.fromkeys(("version", "change")),
    **dict.fromkeys(("job", "stage"), frozenset({"straggler", "straggler_inferred"})),
}
"""Kinds of causes of which the advice of some detectors is wrong (None: of all): it repairs single devices, while what
all of them share is at fault. A site's own advice for the detector is shown."""
Table = dict[str, dict[str, dict[str, str]]]


class AdviceBook:
    """Advice by detector and by kind of cause. pages: address of the page of detectors, which
    replaces a runbook, with the detector chosen."""

    def __init__(self, path: Path | None, pages: str = "") -> None:
        self._path, self._pages = path, pages
        self._shipped = read_advice(SHIPPED)
        self._own: Table = {} if path is None else read_advice(path)
        self._read = None if path is None else _stamp(path)

    def find(self, detector: str, cause: str) -> dict[str, str | None]:
        """Returns `advice` (that of the detector, then that of the kind of cause) and `runbook_url`."""
        self._refresh()
        of_detector = self._merged("detector", detector)
        of_cause = {} if detector in NOT_OF_CAUSE else self._merged("cause", kind_of(cause))
        unfit = ONLY_CAUSE.get(kind_of(cause), frozenset())
        own = self._own.get("detector", {}).get(detector, {})
        if of_cause and (unfit is None or detector in unfit) and not own.get("advice"):
            of_detector = {name: text for name, text in of_detector.items() if name != "advice"}
        texts = [text for text in (of_cause.get("advice"), of_detector.get("advice")) if text]
        page = f"{self._pages}?{urlencode({'detector': detector})}" if self._pages and detector else self._pages
        runbook = of_detector.get("runbook") or of_cause.get("runbook") or page
        return {"advice": " ".join(texts) or None, "runbook_url": runbook or None}

    def _merged(self, section: str, name: str) -> Mapping[str, str]:
        own = self._own.get(section, {}).get(name, {})
        return {**self._shipped.get(section, {}).get(name, {}), **own}

    def _refresh(self) -> None:
        """Reads the site's file again if it changed."""
        if self._path is None or (stamp := _stamp(self._path)) == self._read:
            return
        self._read = stamp
        try:
            self._own = read_advice(self._path)
        except ConfigError as error:
            log.error("%s; the advice read before stays in force", error)


def read_advice(path: Path) -> Table:
    """Returns section -> name -> key -> text. Raises ConfigError naming the file, key, found and expected value."""
    try:
        found: dict[str, Any] = parse_toml(read_regular_text(path))
    except OSError as error:
        raise ConfigError(f"[incidents] advice_file = '{path}': cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for section, names in found.items():
        if section not in SECTIONS or not isinstance(names, dict):
            raise ConfigError(f"{path}: [{section}]: expected [detector.NAME] or [cause.KIND]")
        for name, keys in names.items():
            if wrong := _find_wrong(keys):
                raise ConfigError(f"{path}: [{section}.{name}]: expected the texts advice and runbook, found {wrong}")
    if path != SHIPPED:
        _check_detectors(path, found.get("detector", {}))
    return found


def _find_wrong(keys: Any) -> str:
    """Returns the first key that is none, without its value, which may be huge or deep; empty if all are right."""
    if not isinstance(keys, dict):
        return "no table"
    wrong = next((key for key, text in keys.items() if key not in KEYS or not isinstance(text, str)), "")
    return f"{wrong}, which is no text" if wrong in KEYS else wrong


def _check_detectors(path: Path, given: Iterable[str]) -> None:
    """Raises ConfigError on a detector that is not shipped, so that there is none of its name."""
    known = read_advice(SHIPPED)["detector"]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{path}: [detector.{name}]: no such detector; {hint}")


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
