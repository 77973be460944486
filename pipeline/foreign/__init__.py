"""Telemetry of other senders, such as OpenTelemetry Collectors: decodes it and maps it to our signals."""
