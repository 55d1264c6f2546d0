"""Steps of a plain recommender: eager with dense gradients of its tables, captured, and with fused updates."""
