"""The quality of the data: which sources are silent or fail, what that blinds, and what was lost, late or rejected."""
