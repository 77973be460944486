"""Collectors, one folder per kind of device. `registry.py` lists them; modules here are shared by several folders."""
