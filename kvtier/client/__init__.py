"""The client that engines use. See client.py."""

from kvtier.client import fork  # First, for it must come before gRPC.
from kvtier.client.calls import Missed
from kvtier.client.client import Client, DropResult, GetResult
from kvtier.client.leases import ReadLease, WriteLease

__all__ = ["Client", "DropResult", "GetResult", "Missed", "ReadLease", "WriteLease", "fork"]
