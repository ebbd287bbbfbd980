"""Clients of our own for the command line, Spark and Python programs."""
