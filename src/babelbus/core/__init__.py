"""The broker: no word of any protocol."""
