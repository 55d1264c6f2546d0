"""Do the hash's two sums mix well? Collisions among the effects of one bit flip."""

from __future__ import annotations

import torch
from torch import Tensor

from graphpasses.parity._lanes import lanes, signed

NUM_POSITIONS = 1 << 17
# Two elements can only change places unseen if flipping a bit has the same effect at both positions.
FLIPS = {
    "bit 63 (sign of float64)": 1 << 63,
    "bit 62": 1 << 62,
    "bits 31 to 63 (sign of float32, sign-extended)": -(1 << 31),
    "bit 0": 1,
}


def effects(flip: int) -> Tensor:
    """Returns the change of both sums that a flip of a zero makes at each position, int64 [num_positions, 2]."""
    zero, flipped, shape = torch.tensor([0]), torch.tensor([signed(flip)]), (NUM_POSITIONS,)
    return torch.stack([lanes(flipped, shape, (p,)) - lanes(zero, shape, (p,)) for p in range(NUM_POSITIONS)])


def num_collisions(values: Tensor) -> int:
    return len(values) - len(values.unique())


def main() -> None:
    expected = NUM_POSITIONS**2 / 2 / 2**32
    print(f"{NUM_POSITIONS} positions; a random function has {expected:.0f} collisions in 32 bits\n")
    print(
        "| flip | sum 1: 64 bits, low 32, high 32 | sum 2: 64 bits, low 32, high 32 | 16 low bits of both |"
    )
    print("|---|---:|---:|---:|")
    for name, flip in FLIPS.items():
        first, second = effects(flip).unbind(1)
        cells = [
            ", ".join(str(num_collisions(v)) for v in (x, x & 0xFFFFFFFF, x >> 32)) for x in (first, second)
        ]
        both = (first & 0xFFFF) << 16 | (second & 0xFFFF)
        print(f"| {name} | {cells[0]} | {cells[1]} | {num_collisions(both)} |")


if __name__ == "__main__":
    main()
