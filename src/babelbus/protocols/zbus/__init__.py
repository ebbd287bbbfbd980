"""zbus: MQ and RPC messages of HTTP's shape, over WebSocket and plain HTTP (specs/zbus.md)."""
