"""Figures: how fast Babelbus is, each beside its peers in the same run. `python -m bench --help`."""
