"""Collectors, one folder per kind of device, listed in `registry.py`. Modules here are shared by several folders."""
