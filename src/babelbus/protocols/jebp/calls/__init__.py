"""Calls and streams of jebp/1.2: the frame layer, and a module for each family of methods."""
