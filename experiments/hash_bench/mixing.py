"""Do the hash's two sums mix well? Collisions among the effects of one bit flip."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphpasses.parity._lanes import lanes, signed

NUM_POSITIONS = 1 << 17
NUM_SMALL_BITS = 12
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


def cancelled_pairs(of_mix: Tensor) -> float:
    """Returns the logarithm of how many changes of two elements cancel in both sums, with words of a few bits.

    ``of_mix`` is what the second sum adds for each mix that the first adds, int64 [2^bits]. All pairs of changes are
    counted, by the Fourier transform of both sums' joint distribution.
    """
    size = len(of_mix)
    table = torch.zeros(size, size)
    table[torch.arange(size), of_mix % size] = 1 / size
    spectrum = torch.fft.fft2(table).abs().double()
    return math.log2(spectrum.pow(4).sum().item() / size**2)


def num_collisions(values: Tensor) -> int:
    return len(values) - len(values.unique())


def main() -> None:
    expected = NUM_POSITIONS**2 / 2 / 2**32
    print(f"{NUM_POSITIONS} positions; a random function has {expected:.0f} collisions in 32 bits\n")
    print("| flip | sum 1: 64 bits, low 32, high 32 | sum 2: 64 bits, low 32, high 32 | 16 low bits of both |")
    print("|---|---:|---:|---:|")
    for name, flip in FLIPS.items():
        first, second = effects(flip).unbind(1)
        cells = [", ".join(str(num_collisions(v)) for v in (x, x & 0xFFFFFFFF, x >> 32)) for x in (first, second)]
        both = (first & 0xFFFF) << 16 | (second & 0xFFFF)
        print(f"| {name} | {cells[0]} | {cells[1]} | {num_collisions(both)} |")
    size = 1 << NUM_SMALL_BITS
    mix = torch.arange(size)
    signed_mix = torch.where(mix < size // 2, mix, mix - size)
    ours = cancelled_pairs(signed_mix * (signed_mix >> NUM_SMALL_BITS // 2))
    theirs = cancelled_pairs(torch.randint(size, (size,), generator=torch.Generator().manual_seed(0)))
    print(f"\nwords of {NUM_SMALL_BITS} bits: 2^{ours:.2f} of all changes of two elements cancel in both sums, ")
    print(f"2^{theirs:.2f} with a random function in the place of the second, 2^{cancelled_pairs(mix):.2f} with none")


if __name__ == "__main__":
    main()
