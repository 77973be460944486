"""The error tree. A message says where, what was found, what was wanted, and the mend.

FleetpulseError
  UsageError          bad arguments or bad input files            exit 2
    ConfigError       the configuration file or an override       exit 2
    WrongQuery        SQL that the database cannot run            exit 2
  Unreachable         a dependency does not answer                exit 3
    DamagedStore      the store's file or its log is damaged      exit 3
  Refused             a guard or the sandbox said no              exit 4
    OverLimit         more than a stated limit allows             exit 4
  Permanent           trying again cannot help
    WireError         bytes that are no message of ours
      NewerWireError  a message of a later version of the wire format
    Rejected          sound input that a rule of pipeline/ingest/admission.py does not accept; carries `rule`
    SpoolError        a spool folder that cannot be used
  Retryable           trying again may help; carries `after_s`
  GapError            input that is gone for ever; carries its extent
  Ended               the process was asked to end in the middle of long work
"""

from __future__ import annotations


class FleetpulseError(Exception):
    """Base of every error that Fleetpulse raises on purpose; `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(FleetpulseError):
    """Arguments or input files are not what the command wants."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration file or an override is wrong; the message names file, section and key."""


class WrongQuery(UsageError):  # noqa: N818 - reads as the state it names
    """SQL with a mistake: its syntax, a name that does not exist, a value that does not convert."""


class Unreachable(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A broker, API or other dependency does not answer."""

    exit_code = 3


class DamagedStore(Unreachable):
    """The file of the store, or its write-ahead log, holds bytes that cannot be right."""


class NoAnswer(Unreachable):
    """Something listens there and gives no answer in time: it hangs, or it was stopped."""


class Refused(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A guard or the SQL sandbox refused."""

    exit_code = 4


class OverLimit(Refused):
    """A query needs more time, memory or tables than it may have."""


class Permanent(FleetpulseError):  # noqa: N818 - reads as the state it names
    """Trying again cannot help."""


class WireError(Permanent):
    """Bytes that are no message of ours, or a damaged one."""


class NewerWireError(WireError):
    """A message of a later version of the wire format: an upgrade can read it."""


class Rejected(Permanent):
    """A rule of admission does not accept sound input; the text begins with `rule`, the name of that rule."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class SpoolError(Permanent):
    """A spool folder cannot be used as one."""


class Retryable(FleetpulseError):  # noqa: N818 - reads as the state it names
    """Trying again may help, not before `after_s` seconds."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class GapError(FleetpulseError):
    """Input [first, next_offset) of one partition is gone for ever; the reader goes on at `next_offset`."""

    def __init__(self, topic: str, partition: str, first: int, next_offset: int, cause: str) -> None:
        super().__init__(f"{topic}/{partition}: offsets {first} to {next_offset - 1} are gone ({cause})")
        self.topic, self.partition, self.first, self.next_offset, self.cause = (
            topic,
            partition,
            first,
            next_offset,
            cause,
        )


class Ended(FleetpulseError):  # noqa: N818 - reads as the state it names
    """Somebody asked for the end: what is under way is left, and done again after the next start."""
