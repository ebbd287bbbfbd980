"""The protocols: each folder has its messages, its codec, its session and its client."""
