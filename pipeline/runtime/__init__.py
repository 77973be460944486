"""What every long-running process needs: signals, child processes, heartbeats, log lines, private files."""
