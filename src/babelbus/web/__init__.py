"""The face of the server on HTTP: administration, metrics and health."""
