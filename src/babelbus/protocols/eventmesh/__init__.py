"""EventMesh: topics, consumer groups and requests over TCP, for Apache EventMesh SDKs of every version."""
