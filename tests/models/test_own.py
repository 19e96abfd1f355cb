"""A user's own model by import path: found, called with its hyper-parameters, checked."""

from __future__ import annotations

import sys
import textwrap

import pytest
from torch import nn

from paralign.blueprint import Blueprint
from paralign.errors import ConfigError
from paralign.models.own import load_own_model, load_symbol

SOURCE = """
    from torch import nn
    from paralign.models.llama.blueprint import LlamaBlueprint
    from paralign.models.llama.model import Llama
    from paralign.models.llama.presets import tiny

    import sys
    PATH_DURING_IMPORT = list(sys.path)
    size = 3

    def build(num_layers=2, *, width=8):
        model = nn.Linear(width, width)
        model.num_layers = num_layers
        return model

    def blueprint(model):
        made = LlamaBlueprint(tiny())
        made.model = model
        return made

    class Plain(LlamaBlueprint):
        def __init__(self):
            super().__init__(tiny())

    def needs(width, num_heads=2):
        return nn.Linear(width, width)

    def anything(**hyper):
        model = nn.Linear(1, 1)
        model.hyper = hyper
        return model

    def nothing(*models):
        return None

    def fails():
        raise RuntimeError("mine")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write ``own_pkg/model.py`` into the current folder and forget it afterwards."""
    folder = tmp_path / "own_pkg"
    folder.mkdir()
    (folder / "model.py").write_text(textwrap.dedent(SOURCE))
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "needy.py").write_text("import no_such_dependency\n")
    (folder / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    yield folder
    for name in [each for each in sys.modules if each.split(".")[0] == "own_pkg"]:
        del sys.modules[name]


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_a_symbol_is_found_below_the_current_folder_and_the_path_is_put_back(package):
    before = list(sys.path)
    build = load_symbol("own_pkg.model:build")
    assert build.__module__ == "own_pkg.model"
    assert sys.path == before
    assert sys.modules["own_pkg.model"].PATH_DURING_IMPORT[0] == str(package.parent)


def test_a_model_and_its_blueprint_are_built(package):
    model, blueprint = load_own_model(
        "own_pkg.model:build", "own_pkg.model:blueprint", {"num_layers": 5, "width": 4}
    )
    assert isinstance(model, nn.Linear) and model.in_features == 4 and model.num_layers == 5
    assert isinstance(blueprint, Blueprint) and vars(blueprint)["model"] is model


def test_a_blueprint_class_is_enough(package):
    _, blueprint = load_own_model("own_pkg.model:build", "own_pkg.model:Plain")
    assert type(blueprint).__name__ == "Plain"


def test_build_may_take_any_hyper_parameter(package):
    model, _ = load_own_model("own_pkg.model:anything", "own_pkg.model:blueprint", {"x": 1})
    assert model.hyper == {"x": 1}


@pytest.mark.parametrize("path", ["own_pkg.model", "m:", ":build", "a b:c", "a..b:c", "a:b.c"])
def test_paths_of_another_form_are_refused(path):
    assert refusal(load_symbol, path, key="build") == (
        f"build={path!r} must look like 'pkg.module:name'."
    )


def test_a_module_that_is_not_there_is_named_with_the_folder(package):
    assert refusal(load_symbol, "own_pgk.model:build", key="build") == (
        f"build='own_pgk.model:build': there is no module 'own_pgk' in {package.parent} or in this "
        "Python's packages. Start paralign from the folder that holds it, or install it."
    )
    assert "there is no module 'own_pkg.modle' in" in refusal(load_symbol, "own_pkg.modle:build")


def test_a_module_that_needs_something_missing_is_another_mistake(package):
    assert refusal(load_symbol, "own_pkg.needy:build", key="build") == (
        "build='own_pkg.needy:build': module 'own_pkg.needy' needs 'no_such_dependency', which is "
        "not installed in this Python."
    )


def test_a_module_that_fails_to_import_says_why(package):
    before = list(sys.path)
    assert refusal(load_symbol, "own_pkg.broken:build", key="build") == (
        "build='own_pkg.broken:build': importing module 'own_pkg.broken' failed with "
        "ZeroDivisionError: division by zero"
    )
    assert sys.path == before


def test_a_missing_name_suggests_the_nearest(package):
    assert refusal(load_symbol, "own_pkg.model:buidl", key="build") == (
        "build='own_pkg.model:buidl': module 'own_pkg.model' has no 'buidl'. Did you mean 'build'?"
    )
    assert refusal(load_symbol, "own_pkg.empty:build", key="build") == (
        "build='own_pkg.empty:build': module 'own_pkg.empty' has no 'build'. The module is empty."
    )


def test_what_cannot_be_called_is_refused(package):
    assert refusal(load_symbol, "own_pkg.model:size", key="build") == (
        "build='own_pkg.model:size' is an object of type int, which cannot be called. Name a "
        "function or a class."
    )


def test_hyper_parameters_that_do_not_fit_are_listed(package):
    assert refusal(
        load_own_model,
        "own_pkg.model:needs",
        "own_pkg.model:blueprint",
        {"num_head": 2, "depth": 3},
    ) == (
        "build='own_pkg.model:needs' cannot be called:\n"
        "  - num_head is not a hyper-parameter of this function. Did you mean 'num_heads'?\n"
        "  - depth is not a hyper-parameter of this function. Use one of width, num_heads.\n"
        "  - width has no default and must be set beside build"
    )
    assert refusal(
        load_own_model, "own_pkg.model:fails", "own_pkg.model:blueprint", {"depth": 3}
    ) == (
        "build='own_pkg.model:fails' cannot be called: depth is not a hyper-parameter of this "
        "function. It takes none."
    )


def test_results_of_another_type_are_refused(package):
    assert refusal(load_own_model, "own_pkg.model:nothing", "own_pkg.model:blueprint") == (
        "build='own_pkg.model:nothing' returned an object of type NoneType, not a torch.nn.Module. "
        "Return the whole model."
    )
    assert refusal(load_own_model, "own_pkg.model:build", "own_pkg.model:nothing") == (
        "blueprint='own_pkg.model:nothing' returned an object of type NoneType, not a "
        "paralign.Blueprint. Return an instance of your Blueprint subclass."
    )


def test_errors_of_the_users_own_function_pass_through(package):
    with pytest.raises(RuntimeError, match=r"^mine$"):
        load_own_model("own_pkg.model:fails", "own_pkg.model:blueprint")
