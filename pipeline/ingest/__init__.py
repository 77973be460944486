"""Ingest: messages are checked, admitted and stored, each exactly once."""
