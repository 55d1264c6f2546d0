"""What the parity experiments share: where runs lie, who is done, and the verdict on every comparison."""
