"""The protocols: each folder has its messages, its codec and its session."""
