"""The spools of a node: durable queues on its disk."""
