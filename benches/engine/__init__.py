"""Figures inside a vLLM environment: stock against the plug-in, in one process. `make bench-vllm` runs it."""
