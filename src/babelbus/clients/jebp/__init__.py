"""The client of jebp: publish, fetch, follow and transactions over one encrypted connection."""
