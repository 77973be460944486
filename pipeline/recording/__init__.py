"""Recorded telemetry: Parquet or CSV files and the text files beside them, read and written."""
