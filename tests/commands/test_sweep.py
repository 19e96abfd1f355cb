from __future__ import annotations

import pytest

from paralign.cli import main
from paralign.commands.sweep import parse_duration
from paralign.errors import ConfigError


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text("model: {name: llama, preset: tiny}\n")
    return str(path)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), (" .5 m ", 30)]
)
def test_a_length_of_time(text, seconds):
    assert parse_duration("--budget", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10d", "-1m", "0s", "nan", "1e3"])
def test_what_is_no_length_of_time(text):
    with pytest.raises(ConfigError, match="--budget="):
        parse_duration("--budget", text)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--world"),
        (["--world", "0"], "--world='0'"),
        (["--world", "2", "--subset", "pair"], "Did you mean pairs?"),
        (["--world", "2", "--budget", "10x"], "--budget='10x'"),
        (["--world", "2", "--resume"], "--json FILE"),
        (["--world", "2", "--timeout", "0"], "--timeout='0'"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(run_yaml, options, told, capsys):
    assert main(["sweep", run_yaml, *options]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_no_result_is_not_gone_on_from(run_yaml, tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text("{}")
    options = ["--world", "2", "--resume", "--json", str(file)]
    assert main(["sweep", run_yaml, *options]) == 2
    assert "no result of a sweep" in capsys.readouterr().err
    assert file.read_text() == "{}"
