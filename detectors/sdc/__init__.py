"""Silent data corruption: digests that disagree."""
