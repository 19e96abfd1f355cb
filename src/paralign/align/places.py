"""What each tensor of a run is of the reference's tensors, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass, field

from paralign.align.lens import Lens
from paralign.align.tensor_entry import TensorEntry
from paralign.layout import LocalMap

PLACEMENT = "placement"
CONTENT = "content"
POSITION = "position"
RULE = "rule"


@dataclass(frozen=True)
class Place:
    """Where (part of) a stored tensor belongs."""

    name: str
    """Of the reference's tensor."""
    shape: tuple[int, ...]
    """Its global shape."""
    map: LocalMap
    lens: Lens | None = None
    """How the part is stored; None: as the map says."""
    is_found: bool = False
    """Whether it was found, so that what the trace says of replicas and shards does not hold."""


@dataclass(frozen=True)
class Remap:
    """Ranks whose tensors are not what their names say: the weights at start are another's.

    ``name`` and ``holds`` are layers where all their tensors agree (``layers.0``), else tensors.
    Where both are equal, the tensor's own parts are in another order.
    """

    ranks: tuple[int, ...]
    name: str
    """As recorded; a stage's own number where the stage counts its layers from 0."""
    expected: str
    """The reference's name for what should be there."""
    holds: str
    """The reference's name for what is there."""
    tensors: tuple[str, ...]
    """Recorded names of the tensors that show it."""
    is_followed: bool = False
    """Whether they are compared as what they hold (only their names are wrong, so far as seen)."""

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if self.holds == self.expected:
            return f"{ranks}: {self.name} holds other parts of it than its map says"
        if self.is_followed:
            return (
                f"{ranks}: {self.name} is given as {self.expected}, but holds the weights of "
                f"{self.holds}"
            )
        what = self.name
        if self.name != self.expected:
            what = f"{self.name}, which is {self.expected} of the whole model,"
        return f"{ranks}: {what} holds the weights of {self.holds}"


@dataclass
class Pairing:
    """How a run's tensors correspond to the reference's.

    A tensor that is in none of the tables keeps its own name and map.
    """

    found: dict[tuple[int, str], tuple[Place, ...]] = field(default_factory=dict)
    """Per rank and own name; of parameters and all that follows them (gradients, moments, ...)."""
    modules: dict[tuple[int, str], str] = field(default_factory=dict)
    """Per rank and own module name the reference's, where it differs."""
    paired_by: dict[str, str] = field(default_factory=dict)
    """Per name of the reference, where it is not by placement."""
    remaps: list[Remap] = field(default_factory=list)
    unpaired: dict[str, str] = field(default_factory=dict)
    """Own name -> why nothing was found for it."""
    equal: set[tuple[int, str]] = field(default_factory=set)
    """Rank and own name of the parameters seen to be equal at start, bit for bit."""
    notes: list[str] = field(default_factory=list)

    def places(self, rank: int, entry: TensorEntry) -> list[Place] | None:
        """Return where an entry belongs; None: where it says itself."""
        found = self.found.get((rank, own_name(entry)))
        if found is None:
            return None
        if not entry.shape:  # a number per parameter (Adam's step) goes with each of its parts
            names = dict.fromkeys(place.name for place in found)
            return [Place(name, (), (), is_found=True) for name in names]
        return list(found)

    def module(self, rank: int, name: str) -> str:
        """Return the reference's name of a module, itself or by the nearest one around it."""
        head, tail = name, ""
        while head:
            if (rank, head) in self.modules:
                return self.modules[rank, head] + tail
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return name


def own_name(entry: TensorEntry) -> str:
    """Return the name a tensor has in its module."""
    return entry.source or entry.name
