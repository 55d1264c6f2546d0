"""Step time, memory and calls of compiled recommenders, beside TorchRec eager and torch.compile as shipped."""
