"""sbus: a message bus for the processes of one machine (docs/protocols/sbus.md)."""
