"""The page Jobs: how fast each job is, which ranks are late, and what that costs."""
