"""What only a GPU can show: steps on CUDA and NCCL, CUDA graphs, Inductor, FBGEMM's kernels. Needs torch alone."""
