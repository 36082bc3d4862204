"""The names of vLLM that the plug-in uses, as small as they can be; the engine's tests use the real ones."""

__version__ = "0.32.0"
