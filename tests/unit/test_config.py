"""Settings: where values come from, what stops the start, and that documentation can't drift."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.config import Settings, env_name, flag_name, load, toml_value, unit
from kvtier.config_docs import document, example_toml, markdown_table
from kvtier.errors import ConfigError
from kvtier.sizes import parse_size

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.toml"
    path.write_text('max_sessions = 11\nmax_namespaces = 12\nhost_capacity_bytes = "1.5GiB"\n')
    return path


class TestPrecedence:
    def test_flag_over_environment_over_file_over_default(
        self, toml: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVTIER_MAX_SESSIONS", "21")
        monkeypatch.setenv("KVTIER_MAX_NAMESPACES", "22")
        settings, origins = load({"max_sessions": "31"}, file=toml)
        assert settings.max_sessions == 31
        assert settings.max_namespaces == 22
        assert settings.host_capacity_bytes == 3 << 29
        assert settings.ssd_read_threads == 4
        assert origins == {
            "max_sessions": "flag",
            "max_namespaces": "environment",
            "host_capacity_bytes": "file",
        }

    def test_an_empty_value_overrides_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_SSD_DIRECTORIES", "/somewhere")
        assert load().settings.ssd_directories == (Path("/somewhere"),)
        assert load({"ssd_directories": ""}).settings.ssd_directories == ()

    def test_settings_made_directly_ignore_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVTIER_MAX_SESSIONS", "21")
        assert Settings().max_sessions == 256

    def test_the_name_of_the_file_is_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVTIER_CONFIG", "/elsewhere.toml")
        assert load().origins == {}


class TestUnknownNames:
    def test_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "typo.toml"
        path.write_text('host_capacity_byte = "1GiB"\n')
        with pytest.raises(ConfigError, match=r"host_capacity_byte; .* host_capacity_bytes$"):
            load(file=path)

    def test_a_table_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "table.toml"
        path.write_text("[ssd]\ncodec = 'raw'\n")
        with pytest.raises(ConfigError, match=r"unknown key in .*: ssd; .* ssd_codec"):
            load(file=path)

    @pytest.mark.parametrize(
        ("typo", "meant"),
        [
            ("KVTIER_SSD_CODECS", "KVTIER_SSD_CODEC"),
            ("KVTIER_SESSION_TIMEOUT", "KVTIER_SESSION_TIMEOUT_S"),
            ("KVTIER_QQQ", "KVTIER_"),
        ],
    )
    def test_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, typo: str, meant: str
    ) -> None:
        monkeypatch.setenv(typo, "1")
        with pytest.raises(ConfigError, match=f"environment variable: {typo}; .* is {meant}"):
            load()

    def test_in_the_flags(self) -> None:
        with pytest.raises(ConfigError, match=r"flag: --lease-ttl; .* --lease-ttl-s"):
            load({"lease_ttl": "3"})


class TestValues:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("host_capacity_bytes", "15MiB", "--host-capacity-bytes=15MiB: must be at least 16MiB"),
            ("host_capacity_bytes", "much", "'much' is not a size"),
            ("host_capacity_bytes", "-1", "'-1' is not a size"),
            ("ssd_capacity_bytes", "0", "at least 16MiB"),
            (
                "ssd_codec",
                "zip",
                "--ssd-codec=zip: Input should be 'raw', 'lossless', 'fp8_ds_mla'",
            ),
            ("ssd_codec_rules", "q6", "'q6' is not MODEL=CODEC or TENANT:MODEL=CODEC"),
            ("ssd_codec_rules", "a/*=q6,b/*=q7", "'b/*=q7': the codec must be one of raw, loss"),
            ("ssd_codec_rules", "a/*=q6,", "'' is not MODEL=CODEC"),
            ("ssd_read_threads", "0", "greater than or equal to 1"),
            ("ssd_directories", "/a,,/b", "--ssd-directories=/a,,/b: a name is empty"),
            ("ssd_directories", "/a,/b,/x/../a", "/x/../a is there twice"),
            ("ssd_directories", "/a,/ab,/a/b", "/a/b and /a: one is inside the other"),
            ("ssd_directories", "/a/b/c,/d,/a", "/a and /a/b/c: one is inside the other"),
            ("ssd_scrub_bytes_per_s", "fast", "'fast' is not a size"),
            ("ssd_load_timeout_s", "0", "greater than 0"),
            ("max_age_s", "-1", "greater than or equal to 0"),
            ("lease_ttl_s", "0", "greater than 0"),
            ("lease_ttl_s", "inf", "finite"),
            ("idle_write_after_s", "nan", "finite"),
            ("address", "localhost:80", "neither unix:<path> nor tcp:<host>:<port>"),
            ("metrics_address", "9464", "'9464' is not <host>:<port>"),
            ("log_level", "loud", "--log-level=loud"),
        ],
    )
    def test_out_of_range(self, name: str, value: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load({name: value})
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("given_text", "message"),
        [
            ("max_sessions = true", "max_sessions=True: a boolean has no meaning here"),
            ("host_capacity_bytes = 1.5", "host_capacity_bytes=1.5"),
            ("host_capacity_bytes = -5", "at least 16MiB"),
            ("max_sessions =", "is not TOML"),
            ('ssd_codec_rules = {m = "q6"}', "ssd_codec_rules"),
            ('ssd_directories = ["/a", ""]', "a name is empty"),
            ('ssd_directories = ["/a,b"]', "/a,b: a directory's name can't have a comma"),
            ("ssd_directories = 7", "ssd_directories=7"),
        ],
    )
    def test_wrong_types_in_the_file(self, tmp_path: Path, given_text: str, message: str) -> None:
        path = tmp_path / "kvtier.toml"
        path.write_text(given_text)
        with pytest.raises(ConfigError, match=message):
            load(file=path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no configuration file"):
            load(file=tmp_path / "absent.toml")

    def test_all_problems_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"max-sessions=x.*; --log-level=y"):
            load({"max_sessions": "x", "log_level": "y"})

    def test_a_wrong_address_is_one_problem(self) -> None:
        """Although the default of arena_dir can't be made from it either."""
        with pytest.raises(ConfigError) as caught:
            load({"address": "x"})
        assert "arena" not in str(caught.value)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (
                {"lease_ttl_s": "121"},
                r"lease_ttl_s \(121\) must be at most lease_ttl_max_s \(120\)",
            ),
            ({"heartbeat_s": "10"}, r"heartbeat_s \(10\) must be below session_timeout_s \(10\)"),
            ({"write_queue_bytes": "16MiB"}, r"ssd_batch_bytes \(32MiB\) must be at most write_"),
            (
                {"pin_limit_bytes": "2GiB"},
                r"pin_limit_bytes \(2GiB\) must be at most host_capacity",
            ),
        ],
    )
    def test_values_that_do_not_go_together(self, flags: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load(flags)

    def test_defaults_that_depend_on_other_settings(self) -> None:
        one = load({"address": "unix:/a/b.sock", "host_capacity_bytes": "64MiB"}).settings
        other = load({"address": "unix:/a/c.sock"}).settings
        assert one.pin_limit_bytes == 16 << 20
        assert one.arena_dir.parent == Path("/dev/shm")
        assert one.arena_dir.name.startswith(f"kvtier-{os.getuid()}-")
        assert one.arena_dir != other.arena_dir

    def test_directories_become_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/somebody")
        assert load({"ssd_directories": "~/cache, b"}).settings.ssd_directories == (
            Path("/home/somebody/cache"),
            Path.cwd() / "b",
        )
        assert load({"arena_dir": "arena"}).settings.arena_dir == Path.cwd() / "arena"

    @pytest.mark.parametrize("text", ['"/a,/b"', '["/a", "/b"]'])
    def test_a_list_of_directories(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "kvtier.toml"
        path.write_text(f"ssd_directories = {text}")
        assert load(file=path).settings.ssd_directories == (Path("/a"), Path("/b"))

    def test_one_directory_under_two_names(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(ConfigError, match="b is there twice"):
            load({"ssd_directories": f"{tmp_path}/a,{tmp_path}/b"})

    def test_settings_do_not_change(self) -> None:
        settings = Settings()
        with pytest.raises(ValidationError):
            settings.max_sessions = 3


class TestDocumentation:
    def test_every_setting_has_a_description(self) -> None:
        assert all(doc.meaning.endswith(".") for doc in document())

    def test_durations_carry_their_unit(self) -> None:
        for name, field in Settings.model_fields.items():
            assert (field.annotation is float) == (unit(name) == "seconds"), name

    def test_readme_has_this_table(self) -> None:
        text = (ROOT / "README.md").read_text()
        _, _, rest = text.partition("<!-- settings -->\n")
        block, found, _ = rest.partition("<!-- /settings -->")
        assert found, "README.md lacks the markers of the settings table"
        assert block.strip() == markdown_table().strip(), "run: python -m kvtier.config_docs"

    def test_the_example_file_is_current(self) -> None:
        text = (ROOT / "deploy" / "kvtier.toml").read_text()
        assert text == example_toml(), "run: python -m kvtier.config_docs toml > deploy/kvtier.toml"

    def test_the_example_file_loads_with_everything_uncommented(self, tmp_path: Path) -> None:
        lines = example_toml().splitlines()
        settings = [line[2:] for line in lines if line[2:].split(" = ")[0] in Settings.model_fields]
        path = tmp_path / "kvtier.toml"
        path.write_text("\n".join(settings))
        loaded = load(file=path)
        assert set(loaded.origins) == set(Settings.model_fields)
        changing = {"address", "arena_dir"}
        assert loaded.settings.model_dump(exclude=changing) == Settings().model_dump(
            exclude=changing
        )

    @given(st.text(max_size=20), st.floats(min_value=1e-9, max_value=1e12), st.integers(0, 1 << 62))
    def test_values_survive_toml(self, text: str, seconds: float, size_bytes: int) -> None:
        text = text.replace("\x7f", "")
        for name, value in (("address", text), ("lease_ttl_s", seconds)):
            assert tomllib.loads(f"x = {toml_value(name, value)}")["x"] == value
        read = tomllib.loads(f"x = {toml_value('host_capacity_bytes', size_bytes)}")["x"]
        assert parse_size(read) == size_bytes

    def test_lists_survive_toml(self) -> None:
        value = (Path("/a b"), Path('/"c"'))
        text = toml_value("ssd_directories", value)
        assert tomllib.loads(f"x = {text}")["x"] == ["/a b", '/"c"']

    def test_units_are_what_names_end_in(self) -> None:
        assert unit("ssd_batch_bytes") == "bytes"
        assert unit("ssd_scrub_bytes_per_s") == "bytes/s"
        assert unit("max_age_s") == "seconds"
        assert unit("address") == ""

    def test_names_are_made_from_the_field(self) -> None:
        assert env_name("lease_ttl_s") == "KVTIER_LEASE_TTL_S"
        assert flag_name("lease_ttl_s") == "--lease-ttl-s"
