"""zbus: MQ and RPC messages of HTTP's shape, over WebSocket and plain HTTP (docs/specifications/zbus.md)."""
