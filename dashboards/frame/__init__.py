"""What surrounds every page: search, links within the session, and the choice of the time zone."""
