"""What a config asks for by a name that means more elsewhere: right results, told beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.config.run import RunConfig


def notices(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for every setting that runs in another way than its name promises."""
    if config.tensor.overlap == "mc2":
        yield (
            "tensor.overlap=mc2 runs as chunks: no fused kernel of matmul and collective is used, "
            "on any device. Gradients are the same up to the order of sums. Write overlap: chunks "
            "to say so, and to see no notice."
        )
