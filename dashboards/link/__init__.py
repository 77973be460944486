"""The page about one link."""
