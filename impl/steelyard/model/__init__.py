"""Megatron models: the host they run on, how they are built, and the attention under them."""
