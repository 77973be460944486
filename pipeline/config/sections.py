"""The configuration file: one dataclass per section, and `load`, which reads the TOML file.

Read from --config, else FLEETPULSE_CONFIG, else ./fleetpulse.toml, else /etc/fleetpulse/fleetpulse.toml, else
defaults. FLEETPULSE__SECTION__KEY overrides a key. Unknown keys are errors with a suggestion.
"""

from __future__ import annotations

import math
import os
import re
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.config import files
from pipeline.config.acts import Acts, Executor
from pipeline.config.dashboard import Dashboard
from pipeline.config.layers import Layers, list_layers, make_with_origin, merge_layers
from pipeline.config.objectives import Objective
from pipeline.config.receivers import Notify
from pipeline.config.replaced_lists import describe_replaced
from pipeline.config.settings import HOST, MEMORY, build_section, constraint
from pipeline.config.topology import TopologyFiles

Mode = Literal["record", "notify", "act"]
ANY = "*"
_SCOPE = constraint("an entity such as rack:r12, or * for everywhere", lambda v: v == ANY or ":" in v.strip(":"))


@dataclass(frozen=True)
class ModeRule:
    """[[modes]]: what a detector (*: any) may do in a scope (an entity and its descendants; *: everywhere)."""

    mode: Mode
    detector: str = ANY
    scope: str = field(default=ANY, metadata=_SCOPE)


_SECONDS = constraint("seconds, above 0 and at most 3600", lambda value: 0 < value <= 3600)
_WAIT = constraint("seconds, from 0 to 5", lambda value: 0 <= value <= 5)
_MOST, _LONGEST = 10**10, 100_000
"""Largest number, and days: more is a slip of the keyboard, and times so far away are no timestamps of the store."""
_EIB = 1 << 60
_POSITIVE = constraint(f"a number above 0 and at most {_MOST}", lambda value: 0 < value <= _MOST)
_FRAME = constraint("seconds, 1 to 600", lambda value: 1 <= value <= 600)
_LATENESS = constraint("seconds, 0 to 3600", lambda value: 0 <= value <= 3600)
_MINUTES = constraint("minutes, above 0 and at most 525600 (a year)", lambda value: 0 < value <= 525_600)
_HOURS = constraint("hours, above 0 and at most 2400000", lambda value: 0 < value <= 24 * _LONGEST)
_HOURS_OR_NONE = constraint("hours, 0 to 2400000", lambda value: 0 <= value <= 24 * _LONGEST)
_DAYS = constraint("days, above 0 and at most 100000", lambda value: 0 < value <= _LONGEST)
_SIZE = constraint(f"bytes, 0 to {_EIB} (1 EiB)", lambda value: 0 <= value <= _EIB)
_WINDOW = constraint("days, from 1 to 366", lambda value: 1 <= value <= 366)
_SHARES = constraint("numbers of at least 0", lambda value: all(0 <= n < math.inf for n in value.values()))
_NOT_NEGATIVE = constraint(f"a number from 0 to {_MOST}", lambda value: 0 <= value <= _MOST)
_BYTES = constraint(
    "bytes, at least 65536, or 0 for 1 GiB, at most 5 % of the disk", lambda v: v == 0 or 1 << 16 <= v <= _EIB
)
_QUERY_BYTES = constraint("bytes, at least 67108864 (64 MiB)", lambda value: 64 << 20 <= value <= _EIB)
_SYNC = constraint("seconds, 0 to 60", lambda value: 0 <= value <= 60)
_QUEUE = constraint("bytes, 65536 to 1 GiB", lambda value: 1 << 16 <= value <= 1 << 30)
_QUEUE_S = constraint("seconds, 1 to 86400", lambda value: 1 <= value <= 86_400)
_CATCH_UP = constraint(
    f"a multiple of real time, at least 2 (less would never catch up), at most {_MOST}",
    lambda value: 2 <= value <= _MOST,
)
_JITTER = constraint("seconds, 0 to 600", lambda value: 0 <= value <= 600)
_SHARE = constraint("a share between 0 and 1", lambda value: 0 < value < 1)
_AT_LEAST_ONE = constraint(f"a number from 1 to {_MOST}", lambda value: 1 <= value <= _MOST)
_PORT = constraint("a port, 0 to 65535", lambda value: 0 <= value <= 65535)
_NAME = constraint(
    "a name: not empty, no slash, no control character, not '.' or '..'",
    lambda value: value not in ("", ".", "..") and re.search(r"[/\x00-\x1f\x7f-\x9f]", value) is None,
)
_REPLICAS = constraint("a number of replicas, or -1 for the broker's default", lambda v: v == -1 or 0 < v < 1 << 15)
_SERVERS = constraint(
    "host:port with a port from 1 to 65535, several with commas between them",
    lambda value: all(_is_server(text.strip()) for text in value.split(",")),
)
_HTTP = constraint(
    "nothing, or http://host:port or https://host", lambda v: not v or re.match(r"https?://[^/\s]", v) is not None
)
_ENDPOINT_FORM = re.compile(r"(https://[^/\s@?#]+|http://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?)([/?#]|$)")
_ENDPOINT = constraint(
    "nothing, or https://host/path without a user (http:// only of this host: the secret would be readable on the way)",
    lambda value: not value or _ENDPOINT_FORM.match(value) is not None,
)
_SERVICE = constraint(
    "the first part of the brokers' principal, such as kafka", lambda v: re.fullmatch(r"[^\s/@]+", v) is not None
)
_BOUNDS = constraint("numbers of entities, each above 0", lambda value: all(number > 0 for number in value.values()))
_ENTITIES = constraint(
    'patterns of entities, each kind:name, such as "cdu:row3-*"',
    lambda value: bool(value) and all(re.fullmatch(r"[^\s:]+:\S+", pattern) for pattern in value),
)
_USERS = constraint(
    "Kafka principals, such as ['User:fleetpulse-agent']",
    lambda value: all(re.fullmatch(r"User:\S+", user) for user in value),
)
_LINGER = constraint("seconds, 0 to 10", lambda value: 0 <= value <= 10)
_NAMES = constraint("at least one name of a receiver", lambda value: bool(value) and all(value))
_ATTRIBUTES = constraint(
    "at least one name of an attribute, such as host.name", lambda value: bool(value) and all(value)
)
_TAKEOVER = constraint("seconds, 60 to 86400", lambda value: 60 <= value <= 86400)


def _is_server(text: str) -> bool:
    """Returns whether a text is host:port; an IPv6 address is in brackets."""
    found = re.fullmatch(r"(?:[^\s,:]+|\[[^\s,]+\]):([0-9]{1,5})", text)
    return found is not None and 1 <= int(found[1]) <= 65_535


def state_directory() -> Path:
    """The default folder of state on disk: ~/.local/state/fleetpulse (or below XDG_STATE_HOME).

    The command sets XDG_STATE_HOME for users without a home.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "fleetpulse"


@dataclass(frozen=True)
class Site:
    """[site]: the name of this site, part of every row."""

    name: str = field(default="local", metadata=_NAME)


@dataclass(frozen=True)
class Agent:
    """[agent]: name of this node, interval of readings (s), and the collectors to use (empty: all).

    linger: readings of so many seconds are sent as one message, which is smaller and cheaper; 0: each reading. Events
    are always sent immediately. Chosen: a frame is two of them; more than 10 s would look like silence.
    otlp_port: port on 127.0.0.1 on which the agent receives OTLP over HTTP from programs of its node; 0: off.
    """

    node: str = field(default_factory=lambda: socket.gethostname().split(".")[0], metadata=_NAME)
    interval: float = field(default=1.0, metadata=_SECONDS)
    collectors: tuple[str, ...] = ()
    linger: float = field(default=5.0, metadata=_LINGER)
    otlp_port: int = field(default=0, metadata=_PORT)


@dataclass(frozen=True)
class Edge:
    """[edge]: the rules that agents evaluate themselves, at each reading.

    flow_share: 30 % less flow uses 4 of the 10 K for which a loop is designed (dT = 15.1 K * kW / (L/min)).
    pressure_share: pressure falls with the square of the flow. temperature_slope: a fifth of the 2.3 K/s at which a
    cold plate of 440 J/K warms up at 1 kW without flow. Sensors that usually show less than least_flow (L/min) or
    least_pressure (bar) count as idle; chosen.
    """

    enabled: bool = True
    flow_share: float = field(default=0.7, metadata=_SHARE)
    pressure_share: float = field(default=0.5, metadata=_SHARE)
    temperature_slope: float = field(default=0.5, metadata=_POSITIVE)
    least_flow: float = field(default=1.0, metadata=_POSITIVE)
    least_pressure: float = field(default=0.05, metadata=_POSITIVE)


@dataclass(frozen=True)
class Spool:
    """[spool]: where agents keep messages until they are stored, and the size limits.

    queue_bytes, queue_seconds: per topic, messages that wait in memory for a slow disk. Chosen: 10 minutes, after which
    no detector uses a sample, and the bytes of hours of a node with 8 GPUs (1.2 kB/s).
    """

    directory: Path = field(default_factory=lambda: state_directory() / "spool")
    max_bytes: int = field(default=0, metadata=_BYTES)
    segment_bytes: int = field(default=4 << 20, metadata=_POSITIVE)
    free_bytes: int = field(default=64 << 20, metadata=_SIZE)
    sync_seconds: float = field(default=0.0, metadata=_SYNC)
    queue_bytes: int = field(default=16 << 20, metadata=_QUEUE)
    queue_seconds: float = field(default=600.0, metadata=_QUEUE_S)


@dataclass(frozen=True)
class Kafka:
    """[kafka]: the brokers, our credentials, and settings of the topics that `fleetpulse init` creates (-1: default).

    Certificates and keys are PEM files. A password is only read from its file, never from here.
    username, password_file: with OAUTHBEARER the id and secret of a client at token_endpoint, unless another program
    renews token_file; with GSSAPI our principal, whose key is in keytab_file, or in the ticket cache of kinit.
    node_keys: a folder with a file NODE.key per node; that key signs the node's messages.
    agent_users, pipeline_users: principals to which `fleetpulse init --acls` grants access.
    """

    bootstrap_servers: str = field(default="127.0.0.1:9092", metadata=_SERVERS)
    partitions: int = field(default=32, metadata=_POSITIVE)
    replication_factor: int = field(default=-1, metadata=_REPLICAS)
    retention_hours: float = field(default=72.0, metadata=_HOURS)
    security_protocol: typing.Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: typing.Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER", "GSSAPI"] = "SCRAM-SHA-512"
    username: str = ""
    password_file: Path | None = None
    token_endpoint: str = field(default="", metadata=_ENDPOINT)
    token_scope: str = ""
    token_audience: str = ""
    token_ca_file: Path | None = None
    token_file: Path | None = None
    keytab_file: Path | None = None
    kerberos_service: str = field(default="kafka", metadata=_SERVICE)
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    node_keys: Path | None = None
    agent_users: tuple[str, ...] = field(default=(), metadata=_USERS)
    pipeline_users: tuple[str, ...] = field(default=(), metadata=_USERS)
    catch_up: float = field(default=20.0, metadata=_CATCH_UP)
    jitter: float = field(default=10.0, metadata=_JITTER)


@dataclass(frozen=True)
class Store:
    """[store]: the DuckDB file, the sealed files beside it, and how long they keep rows (docs/store.md).

    hot_hours: full hours older than that are sealed. telemetry_days: a quarter, rollup_days: a year and a month.
    telemetry_bytes: all sealed files, at most half of the disk.

    forget_days: how long a silent device is kept beyond hot_hours. free_bytes: kept free on the disk, at most 5 % of
    it: space for the largest commit and for what DuckDB rewrites at a checkpoint. dead_letter_hours: a week, as in the
    dead-letter topics. history_days: a quarter, so that quarters can be compared. audit_days: a year and a month, as
    auditors ask for. Chosen.

    migration_backup: back the file up, beside it, before a newer version changes its schema (docs/backup.md).
    """

    path: Path = field(default_factory=lambda: state_directory() / "store.duckdb")
    hot_hours: float = field(default=24.0, metadata=_HOURS)
    telemetry_days: float = field(default=90.0, metadata=_DAYS)
    telemetry_bytes: int = field(default=100 << 30, metadata=_SIZE)
    rollup_days: float = field(default=400.0, metadata=_DAYS)
    forget_days: float = field(default=7.0, metadata=_DAYS)
    memory_limit: str = field(default="2GB", metadata=MEMORY)
    free_bytes: int = field(default=256 << 20, metadata=_SIZE)
    dead_letter_hours: float = field(default=168.0, metadata=_HOURS)
    dead_letter_bytes: int = field(default=256 << 20, metadata=_SIZE)
    gap_days: float = field(default=30.0, metadata=_DAYS)
    history_days: float = field(default=90.0, metadata=_DAYS)
    audit_days: float = field(default=400.0, metadata=_DAYS)
    migration_backup: bool = True


@dataclass(frozen=True)
class Api:
    """[api]: address of the pipeline's API. `token_file` has one `name:token` per line; required beyond loopback.

    connections: maximum connections; above it, the one that has been idle longest is closed.
    sql_queries: maximum concurrent queries, each limited to sql_seconds and sql_memory_bytes.
    """

    host: str = field(default="127.0.0.1", metadata=HOST)
    port: int = field(default=8600, metadata=_PORT)
    token_file: Path | None = None
    connections: int = field(default=256, metadata=_POSITIVE)
    sql_seconds: float = field(default=10.0, metadata=_POSITIVE)
    sql_rows: int = field(default=100_000, metadata=_POSITIVE)
    sql_memory_bytes: int = field(default=512 << 20, metadata=_QUERY_BYTES)
    sql_queries: int = field(default=4, metadata=_POSITIVE)


@dataclass(frozen=True)
class Pipeline:
    """[pipeline]: transport, length of a frame (s), and how long a frame waits for late rows (s).

    commit_wait: how long telemetry waits for more before it is committed (s); events never wait.

    clock_bound: a clock error above this (s) is corrected and reported.
    """

    transport: typing.Literal["spool", "kafka"] = "spool"
    frame: float = field(default=10.0, metadata=_FRAME)
    lateness: float = field(default=30.0, metadata=_LATENESS)
    commit_wait: float = field(default=2.0, metadata=_WAIT)
    clock_bound: float = field(default=5.0, metadata=_SECONDS)


@dataclass(frozen=True)
class Limits:
    """[limits]: maximum numbers of entities in telemetry and inventory; entities above a limit are rejected.

    gpus: number of GPUs that this shard is designed for; the limits of all kinds follow from it
    (pipeline/ingest/entities.py). entities_per_sender: 10 times a node of 16 GPUs, or a row of 300 BMCs with 60 sensors
    each. senders, kinds: other limits for single senders, such as a fabric agent, and for kinds.
    """

    gpus: int = field(default=131_072, metadata=_POSITIVE)
    entities_per_sender: int = field(default=20_000, metadata=_POSITIVE)
    senders: Mapping[str, int] = field(default_factory=dict, metadata=_BOUNDS)
    kinds: Mapping[str, int] = field(default_factory=dict, metadata=_BOUNDS)


@dataclass(frozen=True)
class SpeaksFor:
    """[[admission.speaks_for]]: entities (shell patterns) that belong to one sender, whatever their names are."""

    node: str = field(metadata=_NAME)
    entities: tuple[str, ...] = field(metadata=_ENTITIES)


@dataclass(frozen=True)
class Admission:
    """[admission]: which sender may report what. `takeover`: silence of the owner (s) after which others may claim."""

    takeover: float = field(default=600.0, metadata=_TAKEOVER)
    speaks_for: tuple[SpeaksFor, ...] = ()


@dataclass(frozen=True)
class Check:
    """[check]: what `fleetpulse check` uses in addition to this node's agent, and what it ignores."""

    api_url: str = field(default="", metadata=_HTTP)
    token_file: Path | None = None
    incidents: typing.Literal["warning", "critical"] = "warning"
    ignore: tuple[str, ...] = ()
    status_file: Path | None = None


@dataclass(frozen=True)
class Opentelemetry:
    """[opentelemetry]: where the agent exports its own metrics as OTLP, and telemetry if configured. Off if empty.

    `headers_file` has one `Name: value` per line, such as a token; secrets are never in this file.
    """

    endpoint: str = field(default="", metadata=_HTTP)
    metrics: typing.Literal["self", "all"] = "self"
    kafka: bool = False
    interval: float = field(default=10.0, metadata=_SECONDS)
    prometheus_port: int = field(default=0, metadata=_PORT)
    headers_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True)
class Otlp:
    """[otlp]: telemetry of other senders, on the topic otlp_metrics.

    node: attributes of a resource; the first one that is present names the node.
    """

    node: tuple[str, ...] = field(default=("host.id", "host.name", "k8s.node.name"), metadata=_ATTRIBUTES)


@dataclass(frozen=True)
class Gateway:
    """[gateway]: `fleetpulse gateway`, which receives OTLP over HTTP and gRPC, and Prometheus remote write.

    node: the name of its spool. `token_file` has one `name:token` per line; required beyond loopback.
    connections: maximum connections over HTTP; further ones get 503.  grpc: requires the extra `grpc`.
    certificate_file: chain in PEM, which turns TLS on.  key_file: its private key, if it is in another file.
    """

    host: str = field(default="127.0.0.1", metadata=HOST)
    port: int = field(default=4318, metadata=_PORT)
    grpc: bool = False
    grpc_port: int = field(default=4317, metadata=_PORT)
    certificate_file: Path | None = None
    key_file: Path | None = None
    node: str = field(default_factory=lambda: f"gateway-{socket.gethostname().split('.')[0]}", metadata=_NAME)
    token_file: Path | None = None
    connections: int = field(default=256, metadata=_POSITIVE)


@dataclass(frozen=True)
class Budget:
    """[budget]: how many wrong pages a detector may cost before it opens tickets instead; see
    pipeline/judging/page_budget.py.

    days: length of the window.   pages: per 1,000 node-days, by detector or family, in place of the defaults.
    """

    enabled: bool = True
    days: float = field(default=28.0, metadata=_WINDOW)
    pages: Mapping[str, float] = field(default_factory=dict, metadata=_SHARES)


@dataclass(frozen=True)
class EscalationStep:
    """[[incidents.escalation]]: receivers that get a page which waits for a person for so many minutes."""

    after_minutes: float = field(metadata=_MINUTES)
    receivers: tuple[str, ...] = field(metadata=_NAMES)


@dataclass(frozen=True)
class Incidents:
    """[incidents]: how incidents live: acknowledgements, storms, flaps, escalation, advice (docs/incidents.md).

    acknowledge_hours: a page that no one works on any more must not stay quiet for a shift; of tickets, 0: for ever.
    storm_pages, storm_tickets: more than a person reads, within storm_minutes.   flaps: returns within flap_hours
    after which an incident is shown as open for flap_minutes after its findings end.   idle_hours: how long a slow GPU
    stays open without a job that shows it again.   slurm_seconds: between readings of reservations; 0: never. Chosen.
    """

    acknowledge_hours: float = field(default=2.0, metadata=_HOURS_OR_NONE)
    acknowledge_ticket_hours: float = field(default=0.0, metadata=_HOURS_OR_NONE)
    storm_pages: int = field(default=20, metadata=_POSITIVE)
    storm_tickets: int = field(default=20, metadata=_POSITIVE)
    storm_minutes: float = field(default=10.0, metadata=_MINUTES)
    flaps: int = field(default=3, metadata=_POSITIVE)
    flap_hours: float = field(default=6.0, metadata=_HOURS)
    flap_minutes: float = field(default=30.0, metadata=_MINUTES)
    idle_hours: float = field(default=24.0, metadata=_HOURS_OR_NONE)
    slurm_seconds: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    advice_file: Path | None = None
    escalation: tuple[EscalationStep, ...] = ()


@dataclass(frozen=True)
class Impact:
    """[impact]: what a GPU-hour costs, so that incidents show money (docs/impact.md). 0: not shown.

    model_prices: by GPU model, in place of price_per_gpu_hour.   price_per_kwh, carbon_kg_per_kwh: of energy.
    energy_factor: energy of the site per energy of its GPUs: hosts, network and cooling; 1.0: GPUs alone.
    objectives: goodput and availability (docs/objectives.md).   spare_days: until a replaced part arrives.
    spare_level: probability that the planned spares are enough until then.
    """

    price_per_gpu_hour: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    currency: str = "USD"
    model_prices: Mapping[str, float] = field(default_factory=dict, metadata=_SHARES)
    price_per_kwh: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    carbon_kg_per_kwh: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    energy_factor: float = field(default=1.0, metadata=_AT_LEAST_ONE)
    objectives: tuple[Objective, ...] = ()
    spare_days: float = field(default=30.0, metadata=_DAYS)
    spare_level: float = field(default=0.95, metadata=_SHARE)


@dataclass(frozen=True)
class Config:
    """The whole file. `detector` and `collector` are raw tables; their owners convert them with `build_section`."""

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
    limits: Limits = field(default_factory=Limits)
    admission: Admission = field(default_factory=Admission)
    notify: Notify = field(default_factory=Notify)
    topology: TopologyFiles = field(default_factory=TopologyFiles)
    opentelemetry: Opentelemetry = field(default_factory=Opentelemetry)
    otlp: Otlp = field(default_factory=Otlp)
    gateway: Gateway = field(default_factory=Gateway)
    budget: Budget = field(default_factory=Budget)
    incidents: Incidents = field(default_factory=Incidents)
    impact: Impact = field(default_factory=Impact)
    acts: Acts = field(default_factory=Acts)
    executor: Executor = field(default_factory=Executor)
    modes: tuple[ModeRule, ...] = ()
    detector: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    collector: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = "defaults"
    digest: str = field(default="", compare=False)  # of the files as they were read
    replaced: tuple[str, ...] = field(default=(), compare=False)  # what in the files is not in force (replaced_lists)


def load_config(path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Loads the configuration. Raises ConfigError naming file, key, the value found and the one expected."""
    chosen = files.find_file(path, environ)
    source = str(chosen) if chosen else "defaults"
    texts = files.read_texts(chosen, environ)
    layers = list_layers(chosen, environ, texts)
    config = make_with_origin(layers, source, build_config)
    return replace(config, digest=files.digest_texts(texts), replaced=describe_replaced(layers, texts))


def build_config(layers: Layers, where: str) -> Config:
    """Returns what layers amount to, with `where` as their source. Raises ConfigError."""
    table, wrong = merge_layers(layers)
    config = build_section(Config, {**table, "source": where}, where)
    if wrong is not None:
        raise wrong
    return config
