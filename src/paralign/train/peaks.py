"""How many operations a second a device can make, at most: what utilisation is a share of."""

from __future__ import annotations

TERA = 1e12

# Dense peaks by what is in a device's name, from its data sheet: bfloat16 (matrix units), float32
# (without TF32), in 10^12 operations a second. The first row whose words are all there counts.
PEAKS: tuple[tuple[tuple[str, ...], float | None, float], ...] = (
    (("H100", "PCIe"), 756.0, 51.0),
    (("H100", "NVL"), 835.0, 60.0),
    (("H200", "NVL"), 835.0, 60.0),
    (("H100",), 989.4, 66.9),
    (("H200",), 989.4, 66.9),
    (("GB200",), 2500.0, 80.0),
    (("B200",), 2250.0, 75.0),
    (("A100",), 312.0, 19.5),
    (("V100",), None, 15.7),
    (("L40S",), 362.05, 91.6),
    (("RTX 4090",), 165.2, 82.6),
    (("MI250X",), 191.5, 47.9),  # one of its two dies, which is a device
    (("MI300X",), 1307.4, 163.4),
    (("MI325X",), 1307.4, 163.4),
)


def peak_flops(name: str, dtype: str, stated: float | None = None) -> float | None:
    """Return the operations a second that a device can make in ``dtype``, or None: not known.

    Args:
        name: What :func:`paralign.launch.device.device_name` returned.
        dtype: ``bfloat16``, ``float32`` or ``float64``.
        stated: What the user says, in 10^12; it counts more than the table.
    """
    if stated is not None:
        return stated * TERA
    for words, bfloat16, float32 in PEAKS:
        if all(word in name for word in words):
            found = {"bfloat16": bfloat16, "float32": float32}.get(dtype)
            return None if found is None else found * TERA
    return None
