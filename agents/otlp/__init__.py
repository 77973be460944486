"""Telemetry as OTLP for an OpenTelemetry Collector: encoded by template, sent over HTTP or to Kafka.

`messages` has the wire format, `request_layout` a request whose values are overwritten in place, `export` gathers the
agent's ticks, `agent_metrics` has the agent's metrics of itself, `http` and `broker` deliver, `outbox` queues. Loaded
only if [opentelemetry] is configured.
"""
