"""`/node?entity=`: all about one node, or about a device of it."""

from dashboards.node.page import page

__all__ = ["page"]
