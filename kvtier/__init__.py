"""kvtier: a sidecar that keeps MLA KV cache blocks. See kvtier/ARCHITECTURE.md."""

__version__ = "0.1.0"
