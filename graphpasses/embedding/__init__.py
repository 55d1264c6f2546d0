"""TorchRec and FBGEMM in a captured training step; loads neither before it is used."""
