"""Babelbus: one event bus that speaks five protocols over one durable core."""

__version__ = "0.1.0"
