"""The InfiniBand fabric: switches, their ports and links, read with infiniband-diags."""
