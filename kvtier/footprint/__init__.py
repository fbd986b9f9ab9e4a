"""Bytes a token of KV cache takes: geometries.py of which models, sizes.py in which form."""
