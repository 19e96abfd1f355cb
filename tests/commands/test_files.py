from __future__ import annotations

import stat

import pytest

from paralign.commands.files import check_writable, write_atomically
from paralign.errors import ConfigError


def test_the_new_text_replaces_the_old_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_is_readable_like_any_new_file(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.write_text("")
    write_atomically(ours, "")
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: no such file or directory"):
        write_atomically(tmp_path / "no" / "r.json", "x")
    with pytest.raises(ConfigError, match=r"--json='.*r\.json': there is no folder"):
        check_writable("--json", tmp_path / "no" / "r.json")
