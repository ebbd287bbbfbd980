"""The encrypted protocol of jeb, the jCloud Event Bus (docs/protocols/jebp.md)."""
