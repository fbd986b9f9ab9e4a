"""Addresses: what is one, and where daemon and client look when told nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import addresses
from kvtier.errors import ConfigError


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "target"),
        [
            ("unix:/run/kvtier/kvtier.sock", "unix:/run/kvtier/kvtier.sock"),
            ("unix:/tmp/a%20b#c.sock", "unix:/tmp/a%2520b%23c.sock"),
            ("tcp:localhost:80", "localhost:80"),
            ("tcp:[::1]:0", "[::1]:0"),
        ],
    )
    def test_targets_and_text(self, text: str, target: str) -> None:
        address = addresses.parse_address(text)
        assert address.target == target
        assert str(address) == text

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "unix:",
            "unix:relative.sock",
            "unix:/directory/",
            f"unix:/{'x' * 107}",
            "tcp:",
            "tcp:80",
            "tcp:host:",
            "tcp:host:65536",
            "tcp::80",
            "tcp:::1:80",
            "tcp:[host]:80",
            "tcp:a b:80",
            "http://host:80",
        ],
    )
    def test_what_is_no_address(self, text: str) -> None:
        with pytest.raises(ConfigError):
            addresses.parse_address(text)

    @given(st.text(max_size=30))
    def test_any_text_is_an_address_or_a_config_error(self, text: str) -> None:
        for scheme in ("", "unix:/", "tcp:"):
            try:
                addresses.parse_address(scheme + text)
            except ConfigError:
                continue


class TestDefaultAddress:
    @pytest.fixture(autouse=True)
    def _places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(addresses, "_SYSTEM_DIRECTORY", tmp_path / "system")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))

    def test_the_system_directory_where_it_is_ours(self, tmp_path: Path) -> None:
        (tmp_path / "system").mkdir()
        assert addresses.default_address() == f"unix:{tmp_path}/system/kvtier.sock"

    def test_the_runtime_directory_without_it(self, tmp_path: Path) -> None:
        assert addresses.default_address() == f"unix:{tmp_path}/runtime/kvtier/kvtier.sock"

    def test_a_private_directory_without_either(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        expected = tmp_path / "tmp" / f"kvtier-{os.getuid()}"
        assert addresses.default_address() == f"unix:{expected}/kvtier.sock"
        addresses.prepare_directory(addresses.parse_address(addresses.default_address()))
        assert expected.stat().st_mode & 0o777 == 0o700

    def test_a_directory_open_to_others_is_refused(self, tmp_path: Path) -> None:
        directory = tmp_path / "tmp" / f"kvtier-{os.getuid()}"
        directory.mkdir()
        directory.chmod(0o777)
        (directory / "kvtier.sock").touch()
        with pytest.raises(ConfigError, match="only this user"):
            addresses.prepare_directory(addresses.UnixAddress(directory / "kvtier.sock"))
        assert "runtime" in addresses.find_address()

    def test_a_link_in_its_place_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        link = tmp_path / "tmp" / f"kvtier-{os.getuid()}"
        link.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="only this user"):
            addresses.prepare_directory(addresses.UnixAddress(link / "kvtier.sock"))

    def test_a_client_takes_the_first_socket_there_is(self, tmp_path: Path) -> None:
        assert addresses.find_address() == addresses.default_address()
        directory = tmp_path / "tmp" / f"kvtier-{os.getuid()}"
        directory.mkdir(mode=0o700)
        (directory / "kvtier.sock").touch()
        assert addresses.find_address() == f"unix:{directory}/kvtier.sock"
        (tmp_path / "system").mkdir()
        (tmp_path / "system" / "kvtier.sock").touch()
        assert addresses.find_address() == f"unix:{tmp_path}/system/kvtier.sock"

    def test_tcp_needs_no_directory(self, tmp_path: Path) -> None:
        addresses.prepare_directory(addresses.TcpAddress("localhost", 1))
        assert list((tmp_path / "tmp").iterdir()) == []
