"""Fewer passes over memory in a transformer block: what adapters use where the transformer is compiled, and layers with
a LoRA beside their weights everywhere.

A fused module is a stock one under a subclass: parameters, their names and the layers that LoRA wraps stay as they are.
"""
