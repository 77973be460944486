"""The page Data quality: which sources are silent or fail, what that blinds, and what was lost."""
