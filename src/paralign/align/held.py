"""All that a rank holds of a model, with the places of its pieces: what recording and loading read.

Built from the user's arguments alone; ``agree`` then lets the ranks complete it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paralign.align.agreement import exchange
from paralign.align.local_layout import LocalLayouts
from paralign.align.name_rules import NameRule, NameRules
from paralign.align.names import named_parameters
from paralign.align.parameter_pieces import ParameterPieces
from paralign.align.placements import RankAxes
from paralign.align.shard_rules import LayoutRule, ShardRule, ShardRules
from paralign.align.sources import megatron
from paralign.align.sources.choose import readers_of
from paralign.errors import ConfigError


@dataclass(frozen=True)
class HeldParameters:
    """A model's parameters on this rank."""

    pieces: ParameterPieces
    axes: RankAxes
    shard_rules: ShardRules
    name_rules: NameRules

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        *,
        mesh: Any,
        names: NameRule,
        shards: ShardRule | None,
        layouts: LayoutRule | None,
        source: str,
        buffers: str | None = None,
        world_size: int,
    ) -> HeldParameters:
        """Find and name the parameters of ``modules``.

        Raises:
            ConfigError: An argument is not what ``pa.record`` describes.
        """
        readers = readers_of(source)
        by_megatron = source == "megatron" or (
            source == "auto" and megatron.marks(p for m in modules for p in m.parameters())
        )
        if mesh is None and by_megatron:
            mesh = megatron.groups()
        name_rules = NameRules(names)
        parameters = named_parameters(
            modules,
            name_rules,
            buffers=buffers,
            holds_all=world_size == 1,
            global_layers=by_megatron,
        )
        axes = RankAxes(mesh)
        if axes.unresolved and world_size == 1 and max(axes.sizes.values()) > 1:
            raise ConfigError(
                f"mesh={dict(mesh)!r} has several ranks, but this process belongs to no process "
                "group, so it cannot know of them. Call torch.distributed.init_process_group first."
            )
        rules = ShardRules(readers, shards or {}, layouts or {}, alone=world_size == 1)
        pieces = ParameterPieces(parameters, LocalLayouts(axes, rules), readers)
        return cls(pieces, axes, rules, name_rules)

    def agree(
        self,
        world_size: int,
        rank: int,
        *,
        outputs: Collection[str] = (),
        outputs_used: Collection[str] = (),
    ) -> None:
        """Learn from the other ranks where they are and how large their shards are.

        Args:
            world_size: Number of ranks.
            rank: This one.
            outputs: Patterns of modules whose outputs are said to be cut.
            outputs_used: Those that match a module here.

        Comm:
            One all-gather of a small object over the default process group.

        Raises:
            ConfigError: The ranks do not make up the mesh, or a pattern matches nothing on any
                rank.
        """
        parameters = self.pieces.parameters
        patterns = {
            "names": set(self.name_rules.patterns),
            "shards": set(self.shard_rules.shards),
            "layouts": set(self.shard_rules.layouts),
            "outputs": set(outputs),
        }
        mine: Mapping[str, Any] = {
            "coordinates": dict(self.axes.coordinates),
            "sizes": self.shard_rules.own_sizes(parameters),
            "used": {
                "names": sorted(self.name_rules.used),
                "shards": sorted(self.shard_rules.used(parameters)),
                "layouts": sorted(self.shard_rules.used(parameters)),
                "outputs": sorted(outputs_used),
            },
        }
        everyone = exchange(world_size, mine)
        if self.axes.unresolved:
            self.axes.resolve({r: said["coordinates"] for r, said in enumerate(everyone)})
        self.shard_rules.sizes.update({r: said["sizes"] for r, said in enumerate(everyone)})
        problems = [
            f"{argument}={{{pattern!r}: ...}} matches no "
            f"{'module' if argument == 'outputs' else 'parameter'} on any rank"
            for argument, given in patterns.items()
            for pattern in sorted(given)
            if not any(pattern in said["used"][argument] for said in everyone)
        ]
        if problems:
            raise ConfigError.from_problems("cannot place the parameters", problems)
