"""Every configuration of graph_trainer's own integration and numerics tests, with our pipeline."""
