"""Training LoRA adapters: examples, the packed step, checkpoints, the adapter's folder."""
