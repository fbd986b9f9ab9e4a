"""The daemon. gRPC's C library would print its own lines beside ours, so it is told not to."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
