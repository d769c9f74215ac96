"""What drives a sync from PyTorch's own data parallelism: DDP, FSDP2 with HSDP, and the hooks of a model."""
