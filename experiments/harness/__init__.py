"""What all experiments share: selecting cases, training and comparing runs, timing interleaved rounds, tables."""
