"""Sockets in the file system: made in a directory of our own, and never over a live daemon's."""

from __future__ import annotations

import socket
import stat
from contextlib import suppress
from pathlib import Path

from kvtier.addresses import Address, UnixAddress, prepare_directory
from kvtier.errors import AddressInUse, ConfigError


def make_way(address: Address) -> None:
    """Before listening: make the socket's directory, remove what a dead daemon left there.

    Raises:
        AddressInUse: a live daemon listens there, or there is something else than a socket.
        ConfigError: the directory can't be made, or is not ours alone.
    """
    try:
        prepare_directory(address)
    except OSError as error:
        raise ConfigError(f"address {address}: {error.strerror}") from error
    if isinstance(address, UnixAddress):
        _claim(address.path)


def _claim(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(f"{path} exists and is not a socket: choose another address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # A daemon that hangs may have a full backlog: it lives, too.
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()  # Its daemon died.
            return
    raise AddressInUse(f"a live daemon answers at {path}: stop it, or choose another address")
