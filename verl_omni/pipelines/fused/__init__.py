"""Fewer passes over memory in a transformer block: what adapters use where the transformer is compiled.

A fused module is a stock one under a subclass: parameters, their names and the layers that LoRA wraps stay as they are.
"""
