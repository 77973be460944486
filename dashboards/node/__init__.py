"""The page about one node or device."""
