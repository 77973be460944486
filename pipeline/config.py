"""One TOML file -> the dataclass of whoever owns the section. Unknown keys are errors with a suggestion.

Read from --config, else FLEETPULSE_CONFIG, else ./fleetpulse.toml, else defaults. FLEETPULSE__SECTION__KEY overrides.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.modes import ModeRule
from pipeline.settings import Variable, build, wants

PREFIX = "FLEETPULSE__"


_SECONDS = wants("seconds, above 0 and at most 3600", lambda value: 0 < value <= 3600)
_POSITIVE = wants("a number above 0", lambda value: 0 < value < math.inf)
_BYTES = wants("bytes, at least 65536, or 0 for 1 GiB, at most 5 % of the disk", lambda v: v == 0 or v >= 1 << 16)
_SYNC = wants("seconds, 0 to 60", lambda value: 0 <= value <= 60)
_CATCH_UP = wants("times real time, at least 2: less would never catch up", lambda value: value >= 2)
_JITTER = wants("seconds, 0 to 600", lambda value: 0 <= value <= 600)
_SHARE = wants("a share between 0 and 1", lambda value: 0 < value < 1)
_PORT = wants("a port, 0 to 65535", lambda value: 0 <= value <= 65535)
_NAME = wants(
    "a name: not empty, no slash, not '.' or '..'", lambda value: value not in ("", ".", "..") and "/" not in value
)
_REPLICAS = wants("a number of replicas, or -1 for the broker's default", lambda value: value == -1 or value > 0)
_SERVERS = wants(
    "host:port, several with commas between them",
    lambda value: all(re.fullmatch(r"[^\s,:]+:\d{1,5}|\[[^\s,]+\]:\d{1,5}", s.strip()) for s in value.split(",")),
)
_HTTP = wants(
    "nothing, or http://host:port or https://host", lambda v: not v or re.match(r"https?://[^/\s]", v) is not None
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
    """[agent]: which node this is, how often it looks (s), and by which collectors; none named: all."""

    node: str = field(default_factory=lambda: socket.gethostname().split(".")[0], metadata=_NAME)
    interval: float = field(default=1.0, metadata=_SECONDS)
    collectors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """[edge]: the rules that agents judge by themselves, at each look.

    flow_share: 30 % less flow takes 4 of the 10 K for which a loop is designed (dT = 15.1 K * kW / (L/min)).
    pressure_share: pressure falls with the square of the flow. temperature_slope: a fifth of the 2.3 K/s at which a
    cold plate of 440 J/K warms at 1 kW without flow. Sensors that usually show less than least_flow (L/min) or
    least_pressure (bar) are idle; chosen.
    """

    enabled: bool = True
    flow_share: float = field(default=0.7, metadata=_SHARE)
    pressure_share: float = field(default=0.5, metadata=_SHARE)
    temperature_slope: float = field(default=0.5, metadata=_POSITIVE)
    least_flow: float = field(default=1.0, metadata=_POSITIVE)
    least_pressure: float = field(default=0.05, metadata=_POSITIVE)


@dataclass(frozen=True)
class Spool:
    """[spool]: where agents keep what is not yet stored, and how much of it at most."""

    directory: Path = field(default_factory=lambda: state_directory() / "spool")
    max_bytes: int = field(default=0, metadata=_BYTES)
    segment_bytes: int = field(default=4 << 20, metadata=_POSITIVE)
    free_bytes: int = 64 << 20
    sync_seconds: float = field(default=0.0, metadata=_SYNC)


@dataclass(frozen=True)
class Kafka:
    """[kafka]: the brokers, who we are to them, and how `fleetpulse init` makes topics (-1: the broker's default).

    Certificates and keys are PEM files. A password is read from its file alone, never from here.
    """

    bootstrap_servers: str = field(default="127.0.0.1:9092", metadata=_SERVERS)
    partitions: int = field(default=32, metadata=_POSITIVE)
    replication_factor: int = field(default=-1, metadata=_REPLICAS)
    retention_hours: float = field(default=72.0, metadata=_POSITIVE)
    security_protocol: typing.Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: typing.Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    username: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    catch_up: float = field(default=20.0, metadata=_CATCH_UP)
    jitter: float = field(default=10.0, metadata=_JITTER)


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
    """[dashboard]: where pages are served, and which API they read (default: that of [api]).

    `behind_proxy`: something before the pages sees to who reaches them, so that they may leave loopback.
    """

    host: str = "127.0.0.1"
    port: int = field(default=8501, metadata=_PORT)
    behind_proxy: bool = False
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
class Check:
    """[check]: what `fleetpulse check` asks beside this node's agent, and what it passes over."""

    api_url: str = field(default="", metadata=_HTTP)
    token_file: Path | None = None
    incidents: typing.Literal["warning", "critical"] = "warning"
    ignore: tuple[str, ...] = ()
    status_file: Path | None = None


@dataclass(frozen=True)
class TopologyFile:
    """[topology]: a topology.toml with what agents cannot know (racks, loops, leaves)."""

    path: Path | None = None


@dataclass(frozen=True)
class Opentelemetry:
    """[opentelemetry]: where the agent's own metrics go as OTLP, and telemetry too if asked; off without an endpoint.

    `headers_file` holds one `Name: value` per line, as tokens that a collector wants; secrets are never here.
    """

    endpoint: str = field(default="", metadata=_HTTP)
    metrics: typing.Literal["self", "all"] = "self"
    kafka: bool = False
    interval: float = field(default=10.0, metadata=_SECONDS)
    prometheus_port: int = field(default=0, metadata=_PORT)
    headers_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True)
class Config:
    """The whole file. `detector` and `collector` hold raw tables; their owners build them with `build`."""

    site: Site = field(default_factory=Site)
    agent: Agent = field(default_factory=Agent)
    edge: Edge = field(default_factory=Edge)
    spool: Spool = field(default_factory=Spool)
    kafka: Kafka = field(default_factory=Kafka)
    store: Store = field(default_factory=Store)
    api: Api = field(default_factory=Api)
    dashboard: Dashboard = field(default_factory=Dashboard)
    check: Check = field(default_factory=Check)
    pipeline: Pipeline = field(default_factory=Pipeline)
    notify: Notify = field(default_factory=Notify)
    topology: TopologyFile = field(default_factory=TopologyFile)
    opentelemetry: Opentelemetry = field(default_factory=Opentelemetry)
    modes: tuple[ModeRule, ...] = ()
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
    table[keys[-1]] = variable = Variable(text)
    variable.name = name
