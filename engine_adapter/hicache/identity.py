"""Which weights an engine computes with, and how: what SGLang's page hashes do not say.

A page hash covers the tokens, the request's salt and the adapter's id. Everything else that changes
the bytes of a page, under an equal model name, must enter the namespace (user report 2).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.hashing import weights_revision

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
CONFIG_FILES = ("config.json", "hf_quant_config.json", "adapter_config.json", "params.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of itself.

    Attributes:
        model_path: A directory, a file, or a name on a hub.
        revision: Of a name on a hub; None for the default branch.
        load_format: How the weights are read; "dummy" ones come from no file.
        arguments: Settings that change what the model computes, by name.
        draft_model_path: Of a model for speculative decoding, if any; its pages lie in the same
            pools.
        draft_revision: As revision.
        lora_paths: Adapters that the engine was started with.
    """

    model_path: str
    revision: str | None = None
    load_format: str = "auto"
    arguments: Mapping[str, str] | None = None
    draft_model_path: str | None = None
    draft_revision: str | None = None
    lora_paths: tuple[str, ...] = ()


def computation_digest(
    facts: EngineFacts | None, *, model_path: str | None, named_revision: str | None
) -> str:
    """A hex digest of everything of the model that changes bytes, but not its name or layout.

    The first call on a host reads the weights once (hashing.weights_revision remembers).

    Args:
        facts: The engine's; None if it does not say.
        model_path: The operator's word on where the checkpoint is.
        named_revision: The operator's word on which weights these are: nothing is read.

    Raises:
        ConfigError: the weights or an adapter can't be identified.
        OSError: a file can't be read.
    """
    parts: dict[str, object] = {}
    if named_revision is not None:
        parts["weights"] = f"named {named_revision}"
    elif model_path is not None:
        parts["weights"] = checkpoint_revision(model_path, None)
    elif facts is None:
        raise ConfigError(
            "kvtier: which weights SGLang computes with is unknown, so nothing can be cached: put "
            '"model_path" (the checkpoint) or "weights_revision" into the extra config'
        )
    elif facts.load_format == "dummy":
        raise ConfigError(
            "kvtier: dummy weights come from no file: name them by "
            '"weights_revision" in the extra config'
        )
    else:
        parts["weights"] = checkpoint_revision(facts.model_path, facts.revision)
    if facts is not None:
        parts["arguments"] = dict(facts.arguments or {})
        # The id of an adapter that SGLang starts with is made of its name and path: other weights
        # at the same path would hit (user report 1). Later ones have random ids.
        parts["adapters"] = [checkpoint_revision(path, None) for path in facts.lora_paths]
        if facts.draft_model_path is not None:
            parts["draft"] = checkpoint_revision(facts.draft_model_path, facts.draft_revision)
    encoded = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(b"kvtier.sglang.model.v1\n" + encoded).hexdigest()


def checkpoint_revision(path: str, revision: str | None) -> str:
    """Names a checkpoint's content: a hub's commit, or the digest of its files.

    Args:
        path: A directory, a file, or a name on a hub whose snapshot lies in the local hub cache.
        revision: Branch, tag or commit of a name on a hub.

    Raises:
        ConfigError: neither is there, or it has no weights.
        OSError: a file can't be read.
    """
    local = Path(path)
    if local.is_file():
        return weights_revision([local])
    if not local.is_dir():
        snapshot = hub_snapshot(path, revision)
        if snapshot is None:
            raise ConfigError(
                f"kvtier: {path!r} is no directory, and the local hub cache has no snapshot of it, "
                "so its weights can't be identified: give SGLang the checkpoint's directory, or "
                'put "weights_revision" into the extra config'
            )
        local = snapshot
    if local.parent.name == "snapshots" and _COMMIT.fullmatch(local.name):
        # The hub cache names a snapshot by its commit: no need to read hundreds of gigabytes.
        return f"{local.parent.parent.name}@{local.name}"
    weights = sorted({file for pattern in WEIGHT_PATTERNS for file in local.glob(pattern)})
    if not weights:
        raise ConfigError(
            f"kvtier: no weights in {path!r} ({', '.join(WEIGHT_PATTERNS)}): "
            'put "weights_revision" into the extra config'
        )
    configs = [local / name for name in CONFIG_FILES if (local / name).is_file()]
    return weights_revision([*weights, *configs])


def hub_snapshot(name: str, revision: str | None) -> Path | None:
    """Where the Hugging Face hub's cache has a model; None if it has not.

    Layout: models--ORG--NAME/refs/BRANCH has a commit, snapshots/COMMIT the files
    (huggingface_hub's guide "Understand caching").
    """
    home = hub_cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = home / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    snapshot = home / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def hub_cache() -> Path:
    """Where it is, by the hub's own environment variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if directory := os.environ.get(variable):
            return Path(directory)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"
