"""Clients of our own for the protocols: for the command line, Spark and Python programs."""
