"""One TOML file -> the dataclass of whoever owns the section. Unknown keys are errors with a suggestion.

Read from --config, else FLEETPULSE_CONFIG, else ./fleetpulse.toml, else defaults. FLEETPULSE__SECTION__KEY overrides.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import ConfigError

PREFIX = "FLEETPULSE__"
T = TypeVar("T")


def wants(text: str, holds: Callable[[Any], bool]) -> Mapping[str, Any]:
    """Metadata of a field whose value must fulfil `holds`; `text` says so in the message of the ConfigError."""
    return {"fleetpulse.wants": (text, holds)}


_SECONDS = wants("seconds, above 0 and at most 3600", lambda value: 0 < value <= 3600)
_POSITIVE = wants("a number above 0", lambda value: 0 < value < math.inf)
_PORT = wants("a port, 0 to 65535", lambda value: 0 <= value <= 65535)
_NAME = wants(
    "a name: not empty, no slash, not '.' or '..'", lambda value: value not in ("", ".", "..") and "/" not in value
)
_RECEIVER = wants(
    "1 to 64 of A-Z a-z 0-9 _ . - (it goes into an HTTP header)",
    lambda value: re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) is not None,
)


def state_directory() -> Path:
    """Where state lies unless configured: ~/.local/state/fleetpulse (or below XDG_STATE_HOME)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "fleetpulse"


@dataclass(frozen=True)
class Site:
    """[site]: the name that every row of this site bears."""

    name: str = field(default="local", metadata=_NAME)


@dataclass(frozen=True)
class Agent:
    """[agent]: which node this is, and how often it looks (s)."""

    node: str = field(default_factory=lambda: socket.gethostname().split(".")[0], metadata=_NAME)
    interval: float = field(default=1.0, metadata=_SECONDS)


@dataclass(frozen=True)
class Spool:
    """[spool]: where agents keep what is not yet stored, and how much of it at most."""

    directory: Path = field(default_factory=lambda: state_directory() / "spool")
    max_bytes: int = field(default=1 << 30, metadata=_POSITIVE)
    segment_bytes: int = field(default=4 << 20, metadata=_POSITIVE)
    free_bytes: int = 64 << 20


@dataclass(frozen=True)
class Kafka:
    """[kafka]: the brokers, and how `fleetpulse init` makes topics (-1: the broker's default)."""

    bootstrap_servers: str = "127.0.0.1:9092"
    partitions: int = field(default=32, metadata=_POSITIVE)
    replication_factor: int = -1


@dataclass(frozen=True)
class Store:
    """[store]: the DuckDB file, and how many hours stay in it."""

    path: Path = field(default_factory=lambda: state_directory() / "store.duckdb")
    hot_hours: float = field(default=24.0, metadata=_POSITIVE)
    memory_limit: str = "2GB"


@dataclass(frozen=True)
class Api:
    """[api]: where the pipeline serves. `token_file` holds one `name:token` per line; needed to leave loopback."""

    host: str = "127.0.0.1"
    port: int = field(default=8600, metadata=_PORT)
    token_file: Path | None = None
    sql_seconds: float = field(default=10.0, metadata=_POSITIVE)
    sql_rows: int = field(default=100_000, metadata=_POSITIVE)


@dataclass(frozen=True)
class Dashboard:
    """[dashboard]: where pages are served, and which API they read (default: that of [api])."""

    host: str = "127.0.0.1"
    port: int = field(default=8501, metadata=_PORT)
    api_url: str = ""
    token_file: Path | None = None


@dataclass(frozen=True)
class Pipeline:
    """[pipeline]: transport, grid of the frames (s) and how long a frame waits for late rows (s)."""

    transport: typing.Literal["spool", "kafka"] = "spool"
    frame: float = field(default=10.0, metadata=_POSITIVE)
    lateness: float = 30.0


@dataclass(frozen=True)
class Webhook:
    """[[notify.webhooks]]: one receiver of alerts."""

    name: str = field(metadata=_RECEIVER)
    url: str
    format: typing.Literal["alertmanager"] = "alertmanager"
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False


@dataclass(frozen=True)
class Notify:
    """[notify]: receivers of alerts, and the address of the dashboard that links in alerts bear."""

    webhooks: tuple[Webhook, ...] = ()
    external_url: str = ""


@dataclass(frozen=True)
class TopologyFile:
    """[topology]: a topology.toml with what agents cannot know (racks, loops, leaves)."""

    path: Path | None = None


@dataclass(frozen=True)
class Config:
    """The whole file. `detector` and `collector` hold raw tables; their owners build them with `build`."""

    site: Site = field(default_factory=Site)
    agent: Agent = field(default_factory=Agent)
    spool: Spool = field(default_factory=Spool)
    kafka: Kafka = field(default_factory=Kafka)
    store: Store = field(default_factory=Store)
    api: Api = field(default_factory=Api)
    dashboard: Dashboard = field(default_factory=Dashboard)
    pipeline: Pipeline = field(default_factory=Pipeline)
    notify: Notify = field(default_factory=Notify)
    topology: TopologyFile = field(default_factory=TopologyFile)
    detector: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    collector: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = "defaults"


def load(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration in force. Raises ConfigError naming file, key, what was found and what was wanted."""
    chosen = (
        path or environ.get("FLEETPULSE_CONFIG") or ("fleetpulse.toml" if Path("fleetpulse.toml").exists() else None)
    )
    source, table = str(chosen) if chosen else "defaults", _read(Path(chosen)) if chosen else {}
    for name, text in environ.items():
        if name.startswith(PREFIX):
            _override(table, name, text)
    if "source" in table:
        raise ConfigError(f"{source}: [source] is no section")
    return build(Config, {**table, "source": source}, source)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; wanted a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


class _Variable(str):
    """The text of an environment variable: what it means depends on the type that its key wants."""

    __slots__ = ("name",)
    name: str

    @property
    def place(self) -> str:
        return f"environment: {self.name}"

    def meant(self, wanted: Any) -> Any:
        """The text itself where text is wanted and it bears no quotes, else its value as TOML, if it is that."""
        if wanted in (str, Path) and not self.startswith(("'", '"')):
            return str(self)
        try:
            return tomllib.loads(f"v = {self}")["v"]
        except tomllib.TOMLDecodeError:
            return str(self)


def _override(table: dict[str, Any], name: str, text: str) -> None:
    """Puts one environment variable into the table."""
    keys = name.removeprefix(PREFIX).lower().split("__")
    if len(keys) < 2:
        raise ConfigError(f"environment: {name}: wanted {PREFIX}SECTION__KEY")
    for key in keys[:-1]:
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"environment: {name}: '{key}' is no section")
        table = below
    table[keys[-1]] = variable = _Variable(text)
    variable.name = name


def build(cls: type[T], table: Mapping[str, Any], where: str, section: str = "") -> T:
    """Instance of dataclass `cls` from a TOML table. Raises ConfigError on unknown, missing or mistyped keys."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type] # T is a dataclass by contract
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            mend = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(k for k in known if k != 'source')}"
            raise ConfigError(
                f"{_place(where, section, key, value)}: no such {'key' if section else 'section'}; {mend}"
            )
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{_place(where, section, name)}: missing; wanted a value")
    converted = {k: _convert(v, hints[k], where, f"{section}.{k}" if section else k) for k, v in table.items()}
    for key, value in converted.items():
        text, holds = known[key].metadata.get("fleetpulse.wants", ("", None))
        if holds is not None and not holds(value):
            raise ConfigError(f"{_place(where, section, key, table[key])} = {value!r}: wants {text}")
    return cls(**converted)


def _convert(value: Any, wanted: Any, where: str, key: str) -> Any:
    """`value` as type `wanted`, or ConfigError."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType:
        return _convert(value, arguments[0], where, key)
    if isinstance(value, _Variable):
        where, value = value.place, value.meant(wanted)
    if is_dataclass(wanted) and isinstance(wanted, type):
        return build(wanted, _table(value, where, key), where, key)
    if origin is not None and origin is not tuple and isinstance(origin, type) and issubclass(origin, Mapping):
        return {k: _convert(v, arguments[1], where, f"{key}.{k}") for k, v in _table(value, where, key).items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(v, arguments[0], where, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{_place(where, key)} = {value!r}: wants one of {', '.join(map(repr, arguments))}")
    if wanted is Path and isinstance(value, str):
        return Path(value).expanduser()
    if wanted is float and type(value) in (int, float):
        return float(value)
    if wanted is Any or type(value) is wanted:
        return value
    name = "list" if origin is tuple else getattr(wanted, "__name__", str(wanted))
    raise ConfigError(f"{_place(where, key)} = {value!r}: wants {name}, got {type(value).__name__}")


def _table(value: Any, where: str, key: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ConfigError(f"{where}: [{key}] is {value!r}; wanted a table")


def _place(where: str, section: str, key: str = "", value: Any = None) -> str:
    """`FILE: [section] key`, or the variable that `value` came from before it; one dotted name may stand for both."""
    where = value.place if isinstance(value, _Variable) else where
    if not key:
        section, _, key = section.rpartition(".")
    return f"{where}: [{section}] {key}" if section else f"{where}: {key}"
