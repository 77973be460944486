"""The kernel's log: records, the patterns that are looked for, and how often each is told."""
