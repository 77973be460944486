"""Telemetry as OTLP for houses that have a collector of it: encoding by template, sending over HTTP or to Kafka.

`protobuf` writes the wire format, `template` a request whose values are overwritten in place, `layout` what a batch
becomes, `export` ties them to the agent's ticks, `http` and `broker` send. Loaded only where [opentelemetry] wants it.
"""
