"""The agent of one node: its loop, and the commands that read the node once."""
