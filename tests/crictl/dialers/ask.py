"""Asks a CRI server for its version with grpcio, over a Unix socket: `NAME ok` or `NAME ERROR`, one line for each `:authority`."""

import sys

import grpc

SOCKET = sys.argv[1]
WAYS = {
    "default": [],
    "path": [("grpc.default_authority", SOCKET)],
    "encoded-path": [("grpc.default_authority", SOCKET.replace("/", "%2F"))],
}


def passed(message):
    return message


for name, options in WAYS.items():
    try:
        with grpc.insecure_channel("unix:" + SOCKET, options) as channel:
            version = channel.unary_unary("/runtime.v1.RuntimeService/Version", passed, passed)
            for _ in range(3):
                assert b"coracle" in version(b"", timeout=10)
        print(name, "ok")
    except Exception as error:
        print(name, error)
