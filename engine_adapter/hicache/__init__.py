"""What SGLang's HiCache needs of kvtier, as plain parts: nothing here imports SGLang.

    settings.py    the strict extra config
    identity.py    which weights, and how they are computed
    host_pages.py  a host pool's pages as bytes
    namespaces.py  what must be equal for two pools to exchange pages
    page_store.py  pages by SGLang's keys, in chains where SGLang tells them

engine_adapter/sglang.py puts them together into the storage backend.
"""
