"""Clients of our own for the protocols: what the command line, Spark and Python programs connect with."""
