from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paralign
import paralign.cli
from paralign.cli import main
from paralign.errors import AlignError, ConfigError, RankError
from tests.config.wrong import GOOD


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "RUN.yaml"
    path.write_text(GOOD)
    return str(path)


def run_process(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paralign", *argv],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paralign {paralign.__version__}\n"


COMMANDS = (
    *("init", "check", "align", "compare", "inspect", "drill", "sweep", "train"),
    *("export", "import"),
)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_and_nothing_that_is_not_there(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert tuple(re.findall(r"^\S (\w+)  ", out, re.M)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"paralign {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["aligm"], "No such command 'aligm'. Did you mean 'align'? See `paralign --help`."),
        (["align"], "Missing argument 'RUN.yaml'. See `paralign align --help`."),
        (["align", "a", "--foo"], "No such option: --foo"),
        (["align", "a", "b"], "Got unexpected extra argument"),
        (["align", "a", "--timeout", "x"], "--timeout='x' must be a number above 0"),
        (["align", "a", "--timeout", "nan"], "--timeout='nan' must be a number above 0"),
        (["align", "a", "--timeout", "0"], "--timeout='0' must be a number above 0"),
        (["align", "a", "--timeout", "inf"], "--timeout='inf' must be a number above 0"),
        (["align", "a", "-q", "-v"], "--quiet and --verbose contradict each other"),
        (["compare", "a", "b", "-q", "-v"], "--quiet and --verbose contradict each other"),
        (["check", "a", "--world", "0"], "--world='0' must be a whole number of at least 1"),
        (["check", "a", "--world", "x"], "--world='x' must be a whole number of at least 1"),
        (["--foo"], "No such option: --foo"),
    ],
)
def test_wrong_arguments_are_one_paragraph_and_exit_2(argv, message, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    if "-v" not in argv:
        assert err.count("\n") == 1
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "two"], "align.steps='two' (text) must be a whole number of at least 1"),
        (["--steps", "0"], "align.steps=0 must be a whole number of at least 1"),
        (["--dtype", "fp64"], "align.dtype='fp64' (text) must be one of float64"),
        (["--json", "/no/such/folder/r.json"], "there is no folder /no/such/folder"),
        (["--json", "."], "is a folder"),
    ],
)
def test_wrong_options_of_align_are_refused_before_anything_runs(argv, message, run_yaml, capsys):
    assert main(["align", run_yaml, *argv]) == 2
    assert message in capsys.readouterr().err


def raising(error: BaseException):
    def app(*args, **kwargs):
        raise error

    return lambda: app


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("mesh.pp=0 is wrong"), 2, "error: mesh.pp=0 is wrong\n"),
        (AlignError("two runs differ"), 1, "error: two runs differ\n"),
        (RankError("[rank 5: pp=1] died"), 3, "error: [rank 5: pp=1] died\n"),
        (KeyboardInterrupt(), 130, "error: interrupted.\n"),
        (
            ZeroDivisionError("by 0"),
            3,
            "error: ZeroDivisionError: by 0. This was not foreseen. Run it again with -v for the "
            "traceback.\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_status_and_one_paragraph(error, status, message, monkeypatch, capsys):
    monkeypatch.setattr(paralign.cli, "build_app", raising(error))
    assert main(["check"]) == status
    assert capsys.readouterr().err == message


def test_verbose_adds_the_traceback_also_of_the_rank(monkeypatch, capsys):
    error = RankError("[rank 5: pp=1] ValueError: no")
    error.traceback = "Traceback on rank 5"
    monkeypatch.setattr(paralign.cli, "build_app", raising(error))
    assert main(["align", "-v"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: [rank 5: pp=1] ValueError: no\n")
    assert "Traceback (most recent call last)" in err
    assert "Traceback on rank 5" in err


def test_names_in_messages_are_not_markup(monkeypatch, capsys):
    monkeypatch.setattr(paralign.cli, "build_app", raising(ConfigError("[bold]x[/bold] [/] :cat:")))
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "error: [bold]x[/bold] [/] :cat:\n"


def test_one_rank_of_torchrun_speaks_for_all(run_yaml):
    def start(rank: int, world_size: int) -> subprocess.CompletedProcess[str]:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        env = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        env.update({key: str(value) for key, value in world.items()})
        return run_process("align", run_yaml, env=env)

    first, second = start(0, 4), start(1, 4)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "world size 4 does not match the mesh" in first.stderr
    assert second.stderr == ""


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m paralign align --help | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_help_and_version_import_no_torch():
    script = (
        "import sys; from paralign.cli import main; main(['--help']); main(['--version']);"
        "main(['align', '--help']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_module_and_script_are_the_same():
    done = run_process("--version")
    assert (done.returncode, done.stdout) == (0, f"paralign {paralign.__version__}\n")
