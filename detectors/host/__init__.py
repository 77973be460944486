"""Hosts: memory, file systems and disks that run out or wear out."""
