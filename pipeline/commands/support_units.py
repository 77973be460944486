"""The units of fleetpulse and their drop-ins, without what may be a secret: only what is known to be harmless is shown.

A drop-in decides which user runs a service, what it may use and which secrets it gets: many failed starts begin there.
Comments are left out, also the commented-out lines of earlier secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config.addresses import HIDDEN, hide_address, hide_in_text
from pipeline.runtime.systemd import HOST_UNITS

FOLDERS = (
    Path("/usr/lib/systemd/system"),
    Path("/usr/local/lib/systemd/system"),
    Path("/run/systemd/system"),
    HOST_UNITS,
)
"""systemd.unit(5), lowest precedence first."""
_MAX_BYTES = 1 << 20
"""Bytes of a file that are read. Chosen: a unit has a few KiB."""
_SHOWN = re.compile(
    r"Wants|Requires|Requisite|BindsTo|PartOf|Conflicts|Before|After|OnFailure|OnSuccess|WantedBy|RequiredBy|Alias"
    r"|DefaultDependencies|RequiresMountsFor|Condition(?:Path|File|Directory)\w+|StartLimit\w+|Type|NotifyAccess|PIDFile"
    r"|WatchdogSec|Restart\w*|Success\w+|Timeout\w+|RuntimeMaxSec|Kill\w+|SendSIGKILL|OOM\w+|RemainAfterExit"
    r"|User|Group|DynamicUser|SupplementaryGroups|UMask|NoNewPrivileges|CapabilityBoundingSet|AmbientCapabilities"
    r"|EnvironmentFile|LoadCredential(?:Encrypted)?|ImportCredential|WorkingDirectory|RootDirectory"
    r"|(?:Runtime|State|Cache|Logs|Configuration)Directory\w*|Read(?:Write|Only)Paths|(?:Ina|A)ccessiblePaths|ExecPaths"
    r"|Bind(?:ReadOnly)?Paths|TemporaryFileSystem|Protect\w+|Private\w+|Restrict\w+|ProcSubset|LockPersonality"
    r"|MemoryDenyWriteExecute|RemoveIPC|SystemCall\w+|Device(?:Policy|Allow)|IPAddress(?:Allow|Deny)|Limit[A-Z]+"
    r"|(?:Startup)?(?:Memory|CPU|IO|Tasks|AllowedCPUs)\w*|AllowedMemoryNodes|Nice|Slice|Delegate|Standard(?:Output|Error)"
    r"|SyslogIdentifier|LogRateLimit\w+"
)
"""Names whose values are units, users, paths, limits and switches, by systemd.directives(7)."""
_SECTION = re.compile(r"\[[A-Za-z]+\]")
_ASSIGNMENT = re.compile(r"([A-Za-z][\w-]*)\s*=\s*(.*)")
_WORD = re.compile(r"\s*((?:\"[^\"\\]*\"|'[^'\\]*'|[^\s\"'\\])+)(?=\s|$)")
_VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*|[a-z_][a-z0-9_]*)=(.*[^=].*)")
"""A name of two cases, or without a value, may be the end of a secret in base64 that is not quoted."""
_PATH = re.compile(r"(?:/[\w.@%+-]+){2,}/?")
_PATH_NAME = re.compile(r"(?:\w+_)?(?:FILE|PATH|DIR|DIRECTORY)|HOME", re.IGNORECASE)
_SWITCH = re.compile(r"[01]|true|false|yes|no|on|off", re.IGNORECASE)
_PROGRAM = re.compile(r"[-@:+!|]*(?:/[\w.+-]+)+|[-@:+!|]*[a-z][a-z0-9.-]*")
_OPTION = re.compile(r"--?[A-Za-z]|--[a-z][a-z-]*")
_PATH_OPTION = re.compile(r"-c|--(?:[a-z-]*-)?(?:config|directory|dir|file|path)")


def collect_units(folders: Sequence[Path] = FOLDERS) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each unit: its file and its drop-ins of all folders, each after a line with its path."""
    names = {path.name.removesuffix(".d") for folder in folders for path in _list_found(folder)}
    for name in sorted(names):
        files = [folder / name for folder in folders if (folder / name).exists()]
        files += [path for folder in folders for path in sorted((folder / f"{name}.d").glob("*.conf"))]
        yield f"units/{name}.txt", "\n".join(f"# {path}\n{_read(path)}" for path in files)


def hide_secrets(text: str) -> str:
    """Returns the text of a unit: names of what it sets, and values that are known to be no secret."""
    return "".join(f"{_hide_line(line)}\n" for line in _join_lines(text.rstrip()))


def _list_found(folder: Path) -> list[Path]:
    return [*folder.glob("fleetpulse-*.service"), *folder.glob("fleetpulse-*.service.d")]


def _join_lines(text: str) -> Iterator[str]:
    """Yields lines as systemd.syntax(7) reads them: a comment does not end a line that a backslash continues."""
    begun = ""
    for part in map(str.strip, re.split(r"[\n\r\0]", text)):
        if part.startswith(("#", ";")):
            continue
        line = f"{begun} {part}".strip()
        begun = line.removesuffix("\\").strip() if line.endswith("\\") else ""
        if not line.endswith("\\"):
            yield line
    if begun:
        yield begun


def _hide_line(line: str) -> str:
    if not line or _SECTION.fullmatch(line):
        return line
    if (found := _ASSIGNMENT.fullmatch(line)) is None:
        return HIDDEN
    name, value = found[1], found[2]
    if not value:
        return f"{name}="
    if name == "Environment":
        return f"{name}={' '.join(_show_variables(value))}"
    if name.startswith("SetCredential"):
        known = re.match(r"[\w.-]+(?=:)", value)
        return f"{name}={known[0] if known else ''}:{HIDDEN}"
    if name.startswith("Exec") and name != "ExecPaths":
        return f"{name}={' '.join(_show_words(value))}"
    # With "=" it may be another assignment, that a backslash and a space before it continue for newer systemd only.
    return f"{name}={hide_in_text(value) if _SHOWN.fullmatch(name) and '=' not in value else HIDDEN}"


def _show_variables(value: str) -> Iterator[str]:
    for word in _split(value):
        if word is None or (found := _VARIABLE.fullmatch(word)) is None:
            yield HIDDEN
            return  # what follows may belong to a value that is not quoted
        yield f"{found[1]}={_show_value(found[1], found[2])}"


def _show_value(name: str, value: str) -> str:
    if name.upper().endswith("_PROXY"):
        return hide_address(value)
    if _SWITCH.fullmatch(value) or (_PATH_NAME.fullmatch(name) and re.fullmatch(r"/[\w./%+:-]*", value)):
        return value
    return HIDDEN


def _show_words(value: str) -> Iterator[str]:
    """Yields program, names of options, paths that no option of unknown meaning takes, and the command of ours."""
    before = program = ""
    for position, word in enumerate(_split(value)):
        if word is None:
            yield HIDDEN
            return
        name, equals, _ = word.partition("=")
        if position == 0 and _PROGRAM.fullmatch(word):
            program = word.rpartition("/")[2]
            yield word
        elif position == 1 and program == "fleetpulse" and re.fullmatch("[a-z]+", word):
            yield word
        elif _OPTION.fullmatch(name):
            yield f"{name}={HIDDEN}" if equals else name
        elif _PATH.fullmatch(word) and (not before.startswith("-") or _PATH_OPTION.fullmatch(before)):
            yield word
        else:
            yield HIDDEN
        before = word


def _split(value: str) -> Iterator[str | None]:
    """Yields the words of a value, without quotes; None for the rest if it is not plain, as with an escape."""
    position, end = 0, len(value.rstrip())
    while position < end:
        if (found := _WORD.match(value, position)) is None:
            yield None
            return
        yield found[1].replace('"', "").replace("'", "")
        position = found.end()


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            return f"# {path.resolve()}: is no regular file\n"
        with open(path, errors="replace") as file:
            return hide_secrets(file.read(_MAX_BYTES))
    except OSError as error:
        return f"# cannot be read: {error.strerror}\n"
