"""Where a daemon listens: "unix:<path>" or "tcp:<host>:<port>". Standard library only.

Daemon, client and command line all take addresses through here, so their defaults agree.
There is no TLS and no password: a Unix socket is guarded by its directory's permissions, and a
TCP address belongs on loopback or a network whose every member may read the cache.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kvtier.errors import ConfigError

SOCKET_NAME = "kvtier.sock"
ADDRESS_ENV = "KVTIER_ADDRESS"
_SYSTEM_DIRECTORY = Path("/run/kvtier")
_MAX_PATH_BYTES = 107
"""sun_path holds 108 bytes, the last of them zero (unix(7))."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system.

    Attributes:
        path: Absolute.
    """

    path: Path

    @property
    def target(self) -> str:
        """What gRPC dials and listens on; it takes the path as part of a URI, so quoted."""
        return f"unix:{quote(os.fsencode(self.path))}"

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port; port 0 lets the system choose when listening.

    Attributes:
        host: Name or address; an IPv6 address without its brackets.
        port: 0 to 65535.
    """

    host: str
    port: int

    @property
    def target(self) -> str:
        """What gRPC dials and listens on."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"tcp:{self.target}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address that `text` names.

    Raises:
        ConfigError: neither form, a relative or too long path, or no port.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        return UnixAddress(_socket_path(rest))
    if scheme == "tcp":
        return parse_host_port(rest)
    raise ConfigError(f"address {text!r} is neither unix:<path> nor tcp:<host>:<port>")


def parse_host_port(text: str) -> TcpAddress:
    """A "host:port", "[ipv6]:port" pair.

    Raises:
        ConfigError: no host, or no port from 0 to 65535.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not host or (":" in host) != bracketed or any(c.isspace() or c in "[]/" for c in host):
        raise ConfigError(f"{text!r} is not <host>:<port> (write IPv6 as [::1]:<port>)")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{text!r} needs a port from 0 to 65535 after its last colon")
    return TcpAddress(host, int(port))


def _socket_path(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or text.endswith("/") or "\0" in text:
        raise ConfigError(f"unix:{text}: the socket needs an absolute path, as in unix:/run/x.sock")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"unix:{text}: the path is longer than {_MAX_PATH_BYTES} bytes")
    return path


def default_address() -> str:
    """Where a daemon listens that is told nothing: the first directory that is this user's.

    /run/kvtier if it exists and is writable, else $XDG_RUNTIME_DIR/kvtier, else kvtier-UID in the
    directory for temporary files. Creates nothing.
    """
    return next(
        str(UnixAddress(directory / SOCKET_NAME))
        for directory in _directories()
        if directory != _SYSTEM_DIRECTORY or os.access(directory, os.W_OK | os.X_OK)
    )


def find_address() -> str:
    """Where a client looks for a daemon when told nothing.

    $KVTIER_ADDRESS, as for the daemon; else the first of the places of default_address() that has
    a socket, so that an engine also finds the daemon of another user; default_address() if none.
    """
    if address := os.environ.get(ADDRESS_ENV):
        return address
    for directory in _directories():
        path = directory / SOCKET_NAME
        if path.exists() and (directory != _private_directory() or is_private(directory)):
            return str(UnixAddress(path))
    return default_address()


def prepare_directory(address: Address) -> None:
    """Before listening: make the socket's directory, open to its owner only, if there is none.

    Raises:
        ConfigError: the default directory is there but somebody else's, or open to others.
        OSError: it can't be made.
    """
    if isinstance(address, TcpAddress):
        return
    directory = address.path.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory == _private_directory() and not is_private(directory):
        raise ConfigError(
            f"{directory} is not a directory that only this user may write: "
            "remove it, or choose another address"
        )


def _directories() -> Iterator[Path]:
    yield _SYSTEM_DIRECTORY
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield Path(runtime) / "kvtier"
    yield _private_directory()


def _private_directory() -> Path:
    """Anybody may make this name first, so it counts only if is_private()."""
    return Path(tempfile.gettempdir()) / f"kvtier-{os.getuid()}"


def is_private(directory: Path) -> bool:
    """True if `directory` is one, this user's, and only this user may write it."""
    status = directory.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
