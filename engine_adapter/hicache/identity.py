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
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.hashing import weights_revision

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
FILE_FORMATS = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "instanttensor",
    "layered",
    "mistral",
    "pt",
    "safetensors",
)
"""SGLang's load formats that read the weights from the checkpoint's own files, and only from them.
Others make them up, fetch them from elsewhere, or prefer a copy that an earlier start has left."""
CONFIG_PATTERNS = ("*.json", "*.py")
"""How the weights are computed with: the config, what a quantizer left, the checkpoint's code."""
TEXT_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""What makes tokens of texts or samples them: a page hash has the tokens."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of itself.

    Attributes:
        model_path: A directory, a file, or a name on a hub.
        revision: Of a name on a hub; None for the default branch.
        download_dir: Where a name on a hub is kept, if not in the hub's cache.
        load_format: How the weights are read; FILE_FORMATS come from model_path.
        elsewhere: Settings, "name=value", by which weights do not come from model_path.
        arguments: Settings that change what the model computes, by name.
        contents: Files or directories that do, by the setting's name.
        draft_model_path: Of a model for speculative decoding, if any; its pages lie in the same
            pools.
        draft_revision: As revision.
        draft_load_format: As load_format.
        lora_paths: Adapters that the engine was started with.
    """

    model_path: str
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    elsewhere: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    draft_model_path: str | None = None
    draft_revision: str | None = None
    draft_load_format: str = "auto"
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
        ConfigError: the weights, an adapter or a file that a setting names can't be identified.
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
    else:
        _refuse_other_sources(facts, facts.model_path, facts.load_format, facts.elsewhere)
        parts["weights"] = checkpoint_revision(facts.model_path, facts.revision)
    if facts is not None:
        parts["arguments"] = dict(facts.arguments)
        parts["contents"] = {name: _content(name, path) for name, path in facts.contents.items()}
        # The id of an adapter that SGLang starts with is made of its name and path: other weights
        # at the same path would hit (user report 1). Later ones have random ids.
        parts["adapters"] = [checkpoint_revision(path, None) for path in facts.lora_paths]
        if facts.draft_model_path is not None:
            parts["draft"] = _draft_revision(facts, facts.draft_model_path, named_revision)
    encoded = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(b"kvtier.sglang.model.v1\n" + encoded).hexdigest()


def _refuse_other_sources(
    facts: EngineFacts, path: str, load_format: str, elsewhere: tuple[str, ...]
) -> None:
    """Refuse weights that are not those of a checkpoint's files."""
    if load_format not in FILE_FORMATS:
        elsewhere += (f"load format {load_format!r}",)
    if facts.download_dir and not Path(path).exists():
        elsewhere += (f"download_dir={facts.download_dir}",)
    if elsewhere:
        raise ConfigError(
            f"kvtier: with {', '.join(elsewhere)} the weights may be others than those of the "
            f'files of {path!r}, so they can\'t be identified: name them by "weights_revision" in '
            f"the extra config, or load a directory in one of the formats {', '.join(FILE_FORMATS)}"
        )


def _draft_revision(facts: EngineFacts, path: str, named_revision: str | None) -> str:
    """Names the draft model; where its files do not, the operator's word is for both models."""
    try:
        _refuse_other_sources(facts, path, facts.draft_load_format, ())
    except ConfigError:
        if named_revision is None:
            raise
        return f"named {named_revision}"
    return checkpoint_revision(path, facts.draft_revision)


def _content(name: str, path: str) -> str:
    """The digest of what a setting names.

    Raises:
        ConfigError: no file and no checkpoint is there.
        OSError: a file can't be read.
    """
    try:
        return checkpoint_revision(path, None)
    except ConfigError as error:
        raise ConfigError(
            f"kvtier: SGLang's {name}={path!r} changes what is computed, and no file or checkpoint "
            "is there whose content could be hashed: give a file"
        ) from error


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
    found = {file for pattern in CONFIG_PATTERNS for file in local.glob(pattern)}
    configs = [file for file in found if file.is_file() and file.name not in TEXT_FILES]
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
