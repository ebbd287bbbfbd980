"""Sockets and lifecycle: the server that builds every part from a `Config`."""
