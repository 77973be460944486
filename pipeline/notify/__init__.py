"""Alerts to receivers: payloads, the outbox, and delivery over HTTP."""
