"""Wörterbuch: a key/value tree that its clients watch (docs/protocols/worterbuch.md)."""
