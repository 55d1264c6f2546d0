"""Some cases of every parity experiment in one table: what a newcomer runs first."""
