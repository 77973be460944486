"""The error classes. A message names the place, the value found, the value expected, and the remedy.

FleetpulseError
  UsageError          bad arguments or bad input files            exit 2
    ConfigError       the configuration file or an override       exit 2
      MissingCopy       a secret that systemd has not copied        exit 2
    InvalidQuery        SQL that the database cannot run            exit 2
  Unreachable         a dependency does not respond               exit 3
    DamagedStore      the store's file or its log is damaged      exit 3
    HeldStore         another process has it open; has `holder`   exit 3
  Unavailable         the pipeline answers that it starts         exit 3
  Refused             a guard or the sandbox refused              exit 4
    NotAllowed        who asks lacks the right                  exit 4
    OverLimit         above a stated limit                        exit 4
  Permanent           a retry cannot help
    WireError         bytes that are not a valid message
      NewerWireError  a message of a later version of the wire format
    Rejected          valid input that an admission rule (pipeline/ingest/admission.py) rejects; has `rule`
    SpoolError        a spool folder that cannot be used
  Retryable           a retry may help; has `after_s`
    Offline             one partition of the input cannot be read until its brokers are repaired
  GapError            lost input; has its extent
  Ended               long work was interrupted because the process is stopping
"""

from __future__ import annotations

from pathlib import Path


class FleetpulseError(Exception):
    """Base of all errors that Fleetpulse raises; `exit_code` is the exit code of a command."""

    exit_code = 1


class UsageError(FleetpulseError):
    """Arguments or input files are invalid."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration file or an override is wrong; the message names file, section and key."""


class MissingCopy(ConfigError):  # noqa: N818 - reads as the state it names
    """The copy of a secret that systemd makes for a unit is missing; `copy` is its path."""

    def __init__(self, message: str, copy: Path) -> None:
        super().__init__(message)
        self.copy = copy


class InvalidQuery(UsageError):  # noqa: N818 - reads as the state it names
    """SQL with a mistake: its syntax, a name that does not exist, a value that does not convert."""


class Unreachable(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A broker, API or other dependency does not respond."""

    exit_code = 3


class DamagedStore(Unreachable):
    """The store's file or its write-ahead log is damaged."""


class HeldStore(Unreachable):
    """Another process has the store open for writing; `holder` names it, such as `process 4711`."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class NoAnswer(Unreachable):
    """The server accepted the connection but did not respond in time: it hangs or is suspended."""


class Unavailable(FleetpulseError):  # noqa: N818 - reads as the state it names
    """The pipeline answers 503, as while it starts or reloads. Not Unreachable: it has its store open."""

    exit_code = 3


class Refused(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A guard or the SQL sandbox refused."""

    exit_code = 4


class NotAllowed(Refused):
    """Who asks lacks the right, or a rule about acts on machines forbids it."""


class Outdated(Refused):
    """The object has changed since the caller read it."""


class OverLimit(Refused):
    """A query exceeds its limit of time, memory or tables."""


class Permanent(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A retry cannot help."""


class WireError(Permanent):
    """Bytes that are not a valid message: foreign or damaged."""


class NewerWireError(WireError):
    """A message of a newer wire version; an upgrade can read it."""


class Rejected(Permanent):
    """An admission rule rejects valid input; the text begins with `rule`, the name of the rule."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class SpoolError(Permanent):
    """A spool folder that cannot be used."""


class Retryable(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A retry may help, after `after_s` seconds or more."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Offline(Retryable):
    """One partition has no leader: it cannot be read until its brokers are repaired, which may take hours."""


class GapError(FleetpulseError):
    """Input [first, next_offset) of one partition is lost; the reader continues at `next_offset`."""

    def __init__(self, topic: str, partition: str, first: int, next_offset: int, cause: str) -> None:
        super().__init__(f"{topic}/{partition}: offsets {first} to {next_offset - 1} are lost ({cause})")
        self.topic, self.partition, self.first, self.next_offset, self.cause = (
            topic,
            partition,
            first,
            next_offset,
            cause,
        )


class Interrupted(FleetpulseError):  # noqa: N818 - reads as the state it names
    """The process is stopping: the current work is dropped and repeated after the next start."""
