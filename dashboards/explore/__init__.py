"""The page that compares any signals of any devices, and queries the store."""
