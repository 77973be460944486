"""The configured sources: their files read within bounds, again when they change, the last good content kept.

A file that is missing, half written or wrong changes nothing: its source keeps what it said before, the fault is
logged, counted and shown. Files are compared by size, time and inode, which an atomic replacement changes.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.model.errors import UsageError
from pipeline.topology.fabric_files import read_ibnetdiscover, read_lldp
from pipeline.topology.kubernetes import read_labels
from pipeline.topology.merge import MergedTopology, merge_sources
from pipeline.topology.netbox import read_netbox
from pipeline.topology.own_files import read_csv, read_toml
from pipeline.topology.slurm import read_conf, read_yaml
from pipeline.topology.source import Naming, Reader, SourceFile, SourceTopology

log = logging.getLogger("fleetpulse.topology")

READERS: Mapping[str, Reader] = {
    "toml": read_toml,
    "csv": read_csv,
    "netbox": read_netbox,
    "slurm": read_conf,
    "slurm_yaml": read_yaml,
    "kubernetes": read_labels,
    "ibnetdiscover": read_ibnetdiscover,
    "lldp": read_lldp,
}
"""Format of a source -> its reader. Further formats are one line here."""
LINED = frozenset({"csv", "slurm", "slurm_yaml"})
"""Formats in which a file that was cut within a line may be read: a name without its end is another name."""
MAX_BYTES = 256 << 20
"""Most bytes of the files of a source. Chosen: 12,500 nodes as `kubectl get nodes -o json` without images are 60 MB."""
MAX_FILES = 20_000
"""Most files of a folder. Chosen: one answer of lldpcli for each of 12,500 nodes."""
Marks = tuple[tuple[str, int, int, int], ...]
"""(path, size, time in ns, inode) of the files of a source."""


class ReaderError(UsageError):
    """A reader failed in a way that it does not know; the cause has the traceback."""


@dataclass(frozen=True, slots=True)
class SourceSetting:
    """A configured source. path: a file, or a folder whose files are read in order of name."""

    name: str
    format: str
    path: Path
    naming: Naming = field(default_factory=Naming)


def list_files(setting: SourceSetting) -> list[Path]:
    """The files of a source. Raises UsageError."""
    path = setting.path
    try:
        if not path.is_dir():
            return [path]
        found = sorted(p for p in path.iterdir() if not p.name.startswith(".") and p.is_file())
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}", "a file or folder") from error
    if not 0 < len(found) <= MAX_FILES:
        raise _fault(path, f"{len(found)} files", f"1 to {MAX_FILES:,}")
    return found


def read_source(setting: SourceSetting) -> SourceTopology:
    """What a source says now. Raises UsageError."""
    files, size = [], 0
    for path in list_files(setting):
        files.append(SourceFile(str(path), _read_text(path, MAX_BYTES - size)))
        size += len(files[-1].text)
    found = _parse(setting, files)
    if setting.format in LINED:
        found.doubts += (f"{file.path}: its last line has no line break" for file in files if file.text[-1:] != "\n")
    if not found.parents:  # a token that lost its rights lists nothing, which is not a site without devices
        raise _fault(setting.path, "names no device", "at least one, or no such source")
    return found


def _parse(setting: SourceSetting, files: Sequence[SourceFile]) -> SourceTopology:
    """What the files say. Raises UsageError, also where the reader fails in a way that it does not know: one source
    must not stop the others, nor a start."""
    try:
        return READERS[setting.format](files, setting.naming)
    except UsageError:
        raise
    except Exception as error:
        found = f"the reader of {setting.format} failed: {type(error).__name__}: {error}"
        expected = "a file of this format; if it is one, this is a fault of Fleetpulse: report it with the file"
        raise ReaderError(str(_fault(setting.path, found, expected))) from error


def _fault(path: Path, found: str, expected: str) -> UsageError:
    return SourceFile(str(path), "").fault("", found, expected)


def _read_text(path: Path, most: int) -> str:
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _fault(path, "is no regular file", "a file")
            content = file.read(most + 1)
        if len(content) > most:
            raise _fault(path, "too large", f"at most {MAX_BYTES >> 20} MiB in a source")
        if not content.strip():
            raise _fault(path, "is empty", "the topology of the site")
        return content.decode("utf-8")
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}", "a file") from error
    except UnicodeDecodeError as error:
        raise _fault(path, f"is not UTF-8 text: {error}", "UTF-8") from error


def read_marks(setting: SourceSetting) -> Marks:
    """What differs after each change of a source's files; empty if they cannot be listed."""
    try:
        return tuple(
            (str(path), at.st_size, at.st_mtime_ns, at.st_ino) for path in list_files(setting) for at in (path.stat(),)
        )
    except (OSError, UsageError):
        return ()


@dataclass(slots=True)
class SiteTopology:
    """All sources in order of precedence. `faults`: source -> why its newest content is not used.

    good: what each source said last without a fault. refusals: how often a source was refused since the start.
    """

    settings: Sequence[SourceSetting]
    good: dict[str, SourceTopology] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    reloads: int = 0
    _marks: dict[str, Marks] = field(default_factory=dict)

    def find_changed(self) -> list[SourceSetting]:
        """The sources whose files changed since they were read."""
        return [s for s in self.settings if self._marks.get(s.name) != read_marks(s)]

    def read_changed(self) -> bool:
        """Reads the sources that changed; returns whether anything that counts did. A bad one keeps its last content,
        and stops none of the others.

        The marks are taken before the content, so that a change during the read is read again.
        """
        changed = False
        for setting in self.find_changed():
            marks = read_marks(setting)
            try:
                found = read_source(setting)
                self._warn_of_loss(setting.name, len(found.parents))
                self.good[setting.name] = found
                self.faults.pop(setting.name, None)
                changed = True
            except UsageError as error:
                self.faults[setting.name] = str(error)
                self.refusals[setting.name] = self.refusals.get(setting.name, 0) + 1
                kept = "its last content counts" if setting.name in self.good else "it says nothing"
                failed = error.__cause__ if isinstance(error, ReaderError) else None
                log.error("topology source %s refused, %s: %s", setting.name, kept, error, exc_info=failed)
            self._marks[setting.name] = marks
        self.reloads += changed
        return changed

    def _warn_of_loss(self, name: str, left: int) -> None:
        """Logs a source that lost more than half of its entities, as an export that was cut off does."""
        before = len(self.good[name].parents) if name in self.good else 0
        if 2 * left < before:
            log.warning(
                "topology source %s: %d of %d entities are left; if they still exist, export it again",
                name,
                left,
                before,
            )

    def merge(self) -> MergedTopology:
        """All sources as one topology."""
        return merge_sources([(s.name, self.good[s.name]) for s in self.settings if s.name in self.good])


def find_faults(settings: Sequence[SourceSetting]) -> tuple[dict[str, SourceTopology], dict[str, str]]:
    """What the sources say, and why others cannot be read, by name."""
    good, faults = {}, {}
    for setting in settings:
        try:
            good[setting.name] = read_source(setting)
        except UsageError as error:
            faults[setting.name] = str(error)
    return good, faults
