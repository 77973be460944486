"""The spools of a node: durable, bounded queues on its disk, between the agent's loop and their readers."""
