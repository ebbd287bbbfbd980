"""Bytes on disk: synchronous, no asyncio, no protocol (docs/storage.md)."""
