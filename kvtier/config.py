"""Settings of the daemon: what there is to set, and where the values come from.

A flag wins over the environment (KVTIER_*), that over the TOML file, that over the default. An
unknown name in any of them stops the start. The daemon takes a finished Settings; only this module
and the command line know pydantic; config_docs.py writes its documentation.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvtier.addresses import default_address, parse_address, parse_host_port
from kvtier.errors import ConfigError
from kvtier.sizes import exact_size, parse_size
from kvtier.types import WritePolicy

ENV_PREFIX = "KVTIER_"
FILE_ENV = "KVTIER_CONFIG"
"""Names the TOML file where no --config does."""
_UNITS = {"_bytes": "bytes", "_bytes_per_s": "bytes/s", "_s": "seconds"}
"""What settings' names end in; the first that fits counts."""


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _directory(value: object) -> object:
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


def _listed(value: object) -> object:
    """A list, or its text form: comma-separated."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    return value


def _directories(value: object) -> object:
    """A list, or its text form. A directory's name can't have a comma."""
    value = _listed(value)
    if not isinstance(value, list | tuple):
        return value
    if "" in value:
        raise ValueError("a name is empty: write DIR or DIR,DIR")
    return tuple(_directory(part) for part in value)


def _codec_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    """The same without white space around their parts; kvtier.codec makes use of them."""
    found = []
    for rule in rules:
        pattern, _, name = (part.strip() for part in rule.rpartition("="))
        parts = [part.strip() for part in pattern.split(":", 1)]
        if "" in parts or "," in rule:
            raise ValueError(
                f"{rule!r} is not MODEL=CODEC or TENANT:MODEL=CODEC"
                " (no part empty, no comma; * is any model or tenant)"
            )
        if name not in get_args(CodecName):
            raise ValueError(f"{rule!r}: the codec must be one of {', '.join(get_args(CodecName))}")
        found.append(f"{':'.join(parts)}={name}")
    return tuple(found)


def _each_apart(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    seen: dict[Path, Path] = {}
    for path in directories:
        if "," in str(path):
            raise ValueError(f"{path}: a directory's name can't have a comma")
        # Resolved: two names of one directory would be one disk that two shards think is theirs.
        resolved = path.resolve()
        if resolved in seen:
            raise ValueError(f"{path} is there twice")
        for other, name in seen.items():
            # What is inside would count in the outer one's capacity, too.
            if resolved.is_relative_to(other) or other.is_relative_to(resolved):
                raise ValueError(f"{path} and {name}: one is inside the other; name them apart")
        seen[resolved] = path
    return directories


def _at_least(limit_bytes: int) -> AfterValidator:
    def check(size_bytes: int) -> int:
        if size_bytes < limit_bytes:
            raise ValueError(f"must be at least {exact_size(limit_bytes)}")
        return size_bytes

    return AfterValidator(check)


SizeBytes = Annotated[int, BeforeValidator(_size), _at_least(0)]
Capacity = Annotated[int, BeforeValidator(_size), _at_least(16 << 20)]
Buffer = Annotated[int, BeforeValidator(_size), _at_least(1 << 20)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Directory = Annotated[Path, BeforeValidator(_directory)]
Directories = Annotated[
    tuple[Path, ...], NoDecode, BeforeValidator(_directories), AfterValidator(_each_apart)
]

CodecName = Literal["raw", "lossless", "fp8_ds_mla", "q8", "q6", "q4"]
"""The names that kvtier.codec knows."""
CodecRules = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(_listed), AfterValidator(_codec_rules)
]


def _default_arena_dir(validated: dict[str, Any]) -> Path:
    tag = hashlib.sha256(validated["address"].encode()).hexdigest()[:8]
    return Path(f"/dev/shm/kvtier-{os.getuid()}-{tag}")


def _shown(default: str) -> dict[str, Any]:
    """How documentation writes a default that differs from machine to machine."""
    return {"shown_default": default}


class Settings(BaseSettings):
    """Everything an operator can set, checked. Values come from the arguments only: see load().

    Attributes: see each field's description. Names end in their unit. arena_dir and
    pin_limit_bytes hold what is in effect, also where they were left to the default.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True
    )

    address: str = Field(
        default_factory=default_address,
        description="Where the daemon listens: unix:PATH or tcp:HOST:PORT. TCP has neither "
        "TLS nor passwords. Without /run/kvtier: $XDG_RUNTIME_DIR/kvtier, else a private "
        "directory for temporary files.",
        json_schema_extra=_shown("unix:/run/kvtier/kvtier.sock"),
    )
    host_capacity_bytes: Capacity = Field(
        default=1 << 30,
        description="RAM for blocks, in shared memory. At least 16 MiB.",
    )
    arena_dir: Directory = Field(
        default_factory=_default_arena_dir,
        description="Directory on tmpfs for the arena; daemon and engines see it at one path.",
        json_schema_extra=_shown("/dev/shm/kvtier-UID-ADDRESSHASH"),
    )
    ssd_directories: Directories = Field(
        default=(),
        description="Directories for the SSD tier, one an SSD: a list, or text with commas "
        "between them. Blocks are striped over them. Empty: no SSD tier.",
    )
    ssd_capacity_bytes: Capacity = Field(
        default=16 << 30,
        description="Most that each SSD directory may occupy. At least 16 MiB.",
    )
    ssd_min_free_bytes: SizeBytes = Field(
        default=1 << 30,
        description="Least that the file system of an SSD directory keeps free, whoever fills it.",
    )
    ssd_codec: CodecName = Field(
        default="lossless",
        description="Stored form of new blocks on the SSD: raw, lossless, or lossy: fp8_ds_mla, "
        "q8, q6, q4. A lossy one is used for blocks whose clients allow it, lossless for others.",
    )
    ssd_codec_rules: CodecRules = Field(
        default=(),
        description="Stored form by namespace: MODEL=CODEC for every tenant or TENANT:MODEL=CODEC, "
        "with * and ? in names; the first that matches counts, ssd_codec without any. A model "
        "with a colon: *:qwen:7b=q6. A list, or text with commas between them.",
    )
    ssd_durability: Literal["relaxed", "full"] = Field(
        default="relaxed",
        description="relaxed: stored blocks survive the process, a power cut may cost the SSD "
        "tier. full: every batch is synced.",
    )
    ssd_write_policy: WritePolicy = Field(
        default=WritePolicy.LAZY,
        description="When a block goes to the SSD. lazy: when the daemon is idle, or before it "
        "leaves RAM. through: at once. on_evict: before it leaves RAM. second_touch: lazy, but "
        "only once it is used again.",
    )
    ssd_read_threads: Count = Field(
        default=4,
        description="Reads from each SSD directory at the same time; one more for blocks that need "
        "no decoding.",
    )
    ssd_write_threads: Count = Field(
        default=8, description="Writes to each SSD directory at the same time."
    )
    ssd_batch_bytes: Buffer = Field(
        default=32 << 20,
        description="Most that one SSD commit carries. At least 1 MiB, at most an eighth of "
        "ssd_capacity_bytes.",
    )
    write_queue_bytes: Buffer = Field(
        default=256 << 20,
        description="Most that waits for the SSDs; beyond it, blocks leave RAM unwritten. "
        "At least ssd_batch_bytes.",
    )
    ssd_load_timeout_s: Seconds = Field(
        default=2.0,
        description="Time for one read, write or commit. Then a load is a miss, and the SSD "
        "directory gets no work until it answers.",
    )
    ssd_scrub_bytes_per_s: SizeBytes = Field(
        default=4 << 20,
        description="How fast stored blocks are read and checked in each SSD directory while it "
        "has no loads. 0: not at all.",
    )
    ssd_daily_write_bytes: SizeBytes = Field(
        default=0,
        description="Most that is written to all SSD directories together in a day; when it runs "
        "short, only blocks used twice are written, then none. 0: unlimited.",
    )
    ssd_rated_write_bytes: SizeBytes = Field(
        default=0,
        description="Bytes that the makers of the SSDs rate them for, all together (TBW), for "
        "the estimate of their lifetime. 0: unknown.",
    )
    max_age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Oldest that a block may get, in every namespace. 0: no limit.",
    )
    idle_write_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.2,
        description="Time without a request after which unwritten blocks go to the SSD.",
    )
    lease_ttl_s: Seconds = Field(
        default=30.0, description="Life of a lease whose request names none."
    )
    lease_ttl_max_s: Seconds = Field(default=120.0, description="Longest life of a lease.")
    session_timeout_s: Seconds = Field(
        default=10.0, description="Silence of a client after which its session ends."
    )
    heartbeat_s: Seconds = Field(
        default=2.0, description="Time between a client's heartbeats; below session_timeout_s."
    )
    max_sessions: Count = Field(default=256, description="Most sessions at once.")
    max_namespaces: Count = Field(default=1024, description="Most namespaces open at once.")
    pin_limit_bytes: SizeBytes = Field(
        default=0,
        description="Most that pins may keep in RAM. 0: a quarter of host_capacity_bytes.",
    )
    metrics_address: str = Field(
        default="127.0.0.1:9464",
        description="HOST:PORT of /metrics over HTTP. Empty: off.",
    )
    kv_events_address: str = Field(
        default="",
        description="Where KV events are published: unix:PATH or tcp:HOST:PORT, with the IP "
        "address of an interface. Whoever reaches it learns which blocks are cached. Empty: off.",
    )
    kv_events_replay_address: str = Field(
        default="",
        description="Where subscribers ask for events that they missed; written the same way. "
        "Empty: nowhere.",
    )
    kv_events_topic: Annotated[str, Field(max_length=255)] = Field(
        default="kvtier", description="First frame of every KV event message."
    )
    kv_events_buffer_bytes: Buffer = Field(
        default=64 << 20,
        description="Most that is kept of past events for replays. At least 1 MiB.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages logged: debug, info, warning or error."
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="console for people, json for machines."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments alone: load() reads the other sources, to know where a value is from."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a boolean has no meaning here")
        return value

    @field_validator("address", mode="after")
    @classmethod
    def _check_address(cls, value: str) -> str:
        return str(parse_address(value))

    @field_validator("metrics_address", mode="after")
    @classmethod
    def _check_metrics_address(cls, value: str) -> str:
        return parse_host_port(value).target if value else ""

    @field_validator("kv_events_address", "kv_events_replay_address", mode="after")
    @classmethod
    def _check_kv_events_address(cls, value: str) -> str:
        return str(parse_address(value)) if value else ""

    @model_validator(mode="after")
    def _check_replay_has_events(self) -> Settings:
        events, replay = self.kv_events_address, self.kv_events_replay_address
        if replay and not events:
            raise ValueError("kv_events_replay_address has no use without kv_events_address")
        if replay and replay in (events, self.address):
            raise ValueError("kv_events_replay_address must differ from the other addresses")
        if events and events == self.address:
            raise ValueError("kv_events_address must differ from address")
        return self

    @field_validator("pin_limit_bytes", mode="after")
    @classmethod
    def _default_pin_limit(cls, value: int, info: ValidationInfo) -> int:
        return value or int(info.data.get("host_capacity_bytes", 0)) // 4

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        most = "at most"
        bounds = [
            ("lease_ttl_s", most, "lease_ttl_max_s", self.lease_ttl_s <= self.lease_ttl_max_s),
            (
                "heartbeat_s",
                "below",
                "session_timeout_s",
                self.heartbeat_s < self.session_timeout_s,
            ),
            (
                "ssd_batch_bytes",
                most,
                "write_queue_bytes",
                self.ssd_batch_bytes <= self.write_queue_bytes,
            ),
            (
                "pin_limit_bytes",
                most,
                "host_capacity_bytes",
                self.pin_limit_bytes <= self.host_capacity_bytes,
            ),
        ]
        values = self.model_dump()
        wrong = [
            f"{low} ({value_text(low, values[low])}) must be {relation} "
            f"{high} ({value_text(high, values[high])})"
            for low, relation, high, holds in bounds
            if not holds
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class Loaded(NamedTuple):
    """Settings, and of each that was set its origin: "flag", "environment" or "file"."""

    settings: Settings
    origins: Mapping[str, str]


def load(flags: Mapping[str, str] | None = None, *, file: Path | None = None) -> Loaded:
    """Settings from the flags given, the environment and the file, in this order.

    Args:
        flags: By field name, as typed.
        file: TOML, its keys at top level.

    Raises:
        ConfigError: an unknown name, a value out of range, or no such file.
    """
    layers = {
        "file": _read_file(file) if file else {},
        "environment": _read_environment(),
        "flag": dict(flags or {}),
    }
    _refuse_unknown("flag", map(flag_name, layers["flag"]), map(flag_name, Settings.model_fields))
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers.items():
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    try:
        return Loaded(Settings.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error, origins))) from error


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    try:
        values = TomlConfigSettingsSource(Settings, toml_file=path).toml_data
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    _refuse_unknown(f"key in {path}", values, Settings.model_fields)
    return values


def _read_environment() -> dict[str, Any]:
    given = (name for name in os.environ if name.startswith(ENV_PREFIX) and name != FILE_ENV)
    _refuse_unknown("environment variable", given, map(env_name, Settings.model_fields))
    return EnvSettingsSource(Settings, case_sensitive=False)()


def _refuse_unknown(what: str, given: Iterable[str], valid: Iterable[str]) -> None:
    known = list(valid)
    for name in given:
        if name not in known:
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown {what}: {name}; the nearest valid name is {nearest}")


def _problems(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    for detail in error.errors():
        if detail["type"] == "default_factory_not_called":
            continue  # Another field's problem, told there.
        message = detail["msg"].removeprefix("Value error, ")
        if not detail["loc"]:
            yield message
            continue
        name = str(detail["loc"][0])
        spelling = {"flag": flag_name, "environment": env_name}.get(origins.get(name, ""), str)
        yield f"{spelling(name)}={detail['input']}: {message}"


def env_name(field: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + field.upper()


def flag_name(field: str) -> str:
    """The command-line flag of a setting."""
    return "--" + field.replace("_", "-")


def unit(name: str) -> str:
    """The unit that a setting's name ends in, or ""."""
    for suffix, name_of_unit in _UNITS.items():
        if name.endswith(suffix):
            return name_of_unit
    return ""


def value_text(name: str, value: object) -> str:
    """A setting's value as people read it and load() takes it."""
    if isinstance(value, int) and "bytes" in unit(name):
        return exact_size(value)
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def toml_value(name: str, value: object) -> str:
    """A setting's value as TOML writes it; load() reads it back as the same value."""
    if isinstance(value, tuple):
        return json.dumps([str(part) for part in value], ensure_ascii=False)
    text = value_text(name, value)
    is_number = isinstance(value, int | float) and ("bytes" not in unit(name) or text.isdigit())
    return text if is_number else json.dumps(text, ensure_ascii=False)
