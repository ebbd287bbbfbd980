"""Messages of EventMesh over gRPC, made from the .proto files beside them by `make stubs`."""
