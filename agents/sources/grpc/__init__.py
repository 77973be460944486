"""A small client of unary gRPC calls over HTTP/2 without TLS, for services of this very node: call, CallFailed."""
