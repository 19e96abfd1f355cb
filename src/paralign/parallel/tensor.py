"""Tensor parallelism of a whole stage: a blueprint's plan, checked and applied.

A plan maps patterns of module names to styles, as ``parallelize_module`` takes them. It must cover
every parameter, because only the plan knows whether the gradient of a replicated weight is whole on
every rank or a partial sum. See ``docs/tensor-parallel.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.blueprint import matches_name
from paralign.errors import LayoutError
from paralign.parallel.tensor_base import TensorParallel, TensorStyle
from paralign.parallel.tensor_overlap import Handoff
from paralign.parallel.tensor_styles import ColumnParallel, SharedInput
from paralign.parallel.tensor_tokens import OwnTokens
from paralign.parallel.tensor_weights import Spread, spread_

TensorPlan = Mapping[str, TensorStyle]


def tensor_problems(
    model: nn.Module,
    plan: TensorPlan,
    *,
    degree: int,
    options: TensorParallel,
    experts: Sequence[str] = (),
) -> list[str]:
    """Return why ``plan`` cannot spread ``model`` over ``degree`` ranks, one sentence each.

    Args:
        model: The whole model, on any device.
        plan: Pattern of module names, ``*`` for one part of a name -> style.
        degree: Ranks of tp.
        options: Settings of the run.
        experts: Global names of the stacks of experts, which are spread over another mesh. They
            must be inside a module with the style ``OwnTokens``.
    """
    if not plan:
        return [
            f"the blueprint names no tensor-parallel plan, and axis 'tp' has {degree} ranks. "
            "Return it from Blueprint.tensor_parallel(), or use tp=1"
        ]
    names = [name for name, _ in model.named_modules() if name]
    problems = [
        f"tensor_parallel() has {pattern!r}, which matches no module. {_near(pattern, names)}"
        for pattern in plan
        if not any(matches_name(name, pattern) for name in names)
    ]
    for name in names:
        if len(found := [p for p in plan if matches_name(name, p)]) > 1:
            problems.append(f"{name} has two styles, of {found[0]!r} and {found[1]!r}. Keep one")
    if problems:
        return problems
    for name, style in styles_of(model, plan, options):
        module = model.get_submodule(name)
        problems += [f"{name}: {problem}" for problem in style.problems(module, degree)]
    if problems:
        return problems
    return [
        *_coverage_problems(model, plan, degree=degree, options=options, experts=experts),
        *_own_token_problems(model, plan, options, experts),
    ]


def spreads_of(
    model: nn.Module, plan: TensorPlan, *, degree: int, options: TensorParallel
) -> dict[str, Spread]:
    """Return how every parameter is spread, for every name that it has. Needs no ranks."""
    return {
        f"{name}.{leaf}": spread
        for name, style in styles_of(model, plan, options)
        for leaf, spread in style.spreads(model.get_submodule(name), degree).items()
    }


def apply_tensor(
    stage: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: TensorPlan,
    options: TensorParallel,
    experts: Sequence[str] = (),
) -> set[str]:
    """Spread the parameters of ``stage`` in place and wrap its modules.

    Args:
        stage: A stage, or a whole model, of which :func:`tensor_problems` found nothing.
        mesh: The 1-D mesh of the axis.
        plan: As :func:`tensor_problems`; patterns that only other stages match are left to them.
        options: Settings of the run.
        experts: Stacks of experts in ``stage``, which are left alone.

    Returns:
        Names of the parameters whose gradient is a partial sum over the axis: hand them to
        :func:`paralign.parallel.tensor_weights.sum_partial_gradients` after every step.

    Raises:
        LayoutError: A module cannot have its style.
    """
    spreads = spreads_of(stage, plan, degree=mesh.size(), options=options)
    # All at once, so that a parameter with two names stays one.
    spread_(stage, spreads, mesh)
    for name, style in styles_of(stage, plan, options):
        style.apply(stage.get_submodule(name), mesh)
    left = [
        name
        for name, _ in stage.named_parameters()
        if name not in spreads and not _is_inside(name, experts)
    ]
    if left:
        raise LayoutError(f"no style covers {', '.join(left)}. Add their modules to the plan.")
    return {name for name, spread in spreads.items() if spread.is_partial}


def styles_of(
    root: nn.Module, plan: TensorPlan, options: TensorParallel
) -> Iterator[tuple[str, TensorStyle]]:
    """Yield the modules that have a style, and the style with the settings of the run."""
    shared: dict[str, Handoff | None] = {}
    found = {
        name: plan[pattern]
        for name, _ in root.named_modules()
        if (pattern := next((p for p in plan if matches_name(name, p)), None)) is not None
    }
    columns = [name for name, style in found.items() if isinstance(style, ColumnParallel)]
    own = [name for name, style in found.items() if isinstance(style, OwnTokens)]
    for name, style in found.items():
        outer = next((other for other in shared if name.startswith(f"{other}.")), None)
        handoff = shared[outer] if outer is not None else None
        if isinstance(style, SharedInput):
            feeds = any(column.startswith(f"{name}.") for column in columns)
            handoff = Handoff() if options.overlap == "chunks" and feeds else None
            shared[name] = handoff
        # A rank's own tokens are what it has with sequence parallel.
        cut = replace(options, sequence_parallel=True) if _is_inside(name, own) else options
        yield name, style.configured(cut, enters=outer is None, handoff=handoff)


def _own_token_problems(
    model: nn.Module, plan: TensorPlan, options: TensorParallel, experts: Sequence[str]
) -> list[str]:
    styles = list(styles_of(model, plan, options))
    own = [name for name, style in styles if isinstance(style, OwnTokens)]
    problems = [
        f"{name} has style {type(style).__name__}, which sends the stream, inside a module with "
        "style OwnTokens, where a rank has its own tokens alone. Use TokenWise()"
        for name, style in styles
        if style.crossing and _is_inside(name, own)
    ]
    return problems + [
        f"{name} holds experts and is inside no module with style OwnTokens, so that ranks of tp "
        "would compute the same tokens. Give it to the module that calls router and experts"
        for name in experts
        if not _is_inside(name, own)
    ]


def _coverage_problems(
    model: nn.Module,
    plan: TensorPlan,
    *,
    degree: int,
    options: TensorParallel,
    experts: Sequence[str],
) -> list[str]:
    owners: dict[str, list[str]] = {}
    spreads: dict[int, set[Spread]] = {}
    for name, style in styles_of(model, plan, options):
        for leaf, spread in style.spreads(model.get_submodule(name), degree).items():
            owners.setdefault(f"{name}.{leaf}", []).append(name)
            spreads.setdefault(id(model.get_parameter(f"{name}.{leaf}")), set()).add(spread)
    problems = []
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        covering = owners.get(name, [])
        if _is_inside(name, experts):
            problems += [
                f"{name} is one of the blueprint's experts() and is covered by {other} as well. "
                "Keep one"
                for other in covering
            ]
        elif not covering:
            problems.append(
                f"no style covers {name}. Add its module to tensor_parallel(); TokenWise() if it "
                "treats each token alone"
            )
        elif len(covering) > 1:
            problems.append(f"{name} is covered twice, by {' and '.join(covering)}. Keep one")
    for key, found in spreads.items():
        if len(found) > 1:
            ways = ", ".join(sorted(str(spread) for spread in found))
            problems.append(
                f"{' and '.join(names[key])} are one parameter spread in two ways: {ways}"
            )
    return problems


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _near(pattern: str, names: Iterable[str]) -> str:
    known = list(dict.fromkeys(".".join(_star(part) for part in n.split(".")) for n in names))
    near = get_close_matches(pattern, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known[:8])}."


def _star(part: str) -> str:
    return "*" if part.isdigit() else part
