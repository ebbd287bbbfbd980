"""Consumer groups: durable cursors shared by members of any protocol, redelivery, dead letters (docs/groups.md)."""
