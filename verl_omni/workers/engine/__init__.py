"""The training engine: FSDP2 by way of verl's engine, LoRA by way of PEFT."""
