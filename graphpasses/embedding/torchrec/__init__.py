"""Tracing TorchRec and FBGEMM whole: patches, fake kernels, inputs; whatever names a part of them."""
