"""Connectors by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from kvevents.connectors.mixin import check_chunk_size, check_event_hooks
from kvevents.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents.connectors.base import KVConnectorBase, KVConnectorRole

__all__ = ["KVConnectorFactory"]


class KVConnectorFactory:
    """Registers connector classes by name and loads their modules when they are first asked for.

    Follows vLLM's factory. Thread-safe for look-ups; register at import time.
    """

    _registry: ClassVar[dict[str, Callable[[], type[KVConnectorBase]]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class under ``name``; its module is imported on first use.

        Raises :class:`ConfigError` when the name is taken.
        """
        if name in cls._registry:
            raise ConfigError(f"connector {name!r} is already registered")
        cls._registry[name] = lambda: cls._load(module_path, class_name)

    @classmethod
    def get_connector_class(cls, name: str, module_path: str | None = None) -> type[KVConnectorBase]:
        """Return the class registered under ``name``, or the class of that name in ``module_path``.

        Raises :class:`ConfigError` that lists the known names, or says which import failed.
        """
        if module_path:
            return cls._load(module_path, name)
        loader = cls._registry.get(name)
        if loader is None:
            known = ", ".join(sorted(cls._registry)) or "none"
            raise ConfigError(
                f"unknown connector {name!r}; registered are: {known}. "
                "Register it, or give the module that has it (kv_connector_module_path)"
            )
        return loader()

    @classmethod
    def create_connector(
        cls,
        name: str,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: Any = None,
        *,
        module_path: str | None = None,
    ) -> KVConnectorBase:
        """Make one half of a connector, and check that its events can reach the scheduler and its readers.

        The engine's block size is ``vllm_config.cache_config.block_size``, where there is one. Raises
        :class:`ConfigError` as :func:`check_event_hooks` and :func:`check_chunk_size` do.
        """
        connector = cls.get_connector_class(name, module_path)(vllm_config, role, kv_cache_config)
        check_event_hooks(connector)
        cache_config = getattr(vllm_config, "cache_config", None)
        block_size = getattr(cache_config, "block_size", None)
        if isinstance(vllm_config, dict):
            block_size = vllm_config.get("block_size")
        if block_size is not None:
            check_chunk_size(connector, block_size)
        return connector

    @staticmethod
    def _load(module_path: str, class_name: str) -> type[KVConnectorBase]:
        try:
            module = importlib.import_module(module_path)
        except ImportError as e:
            raise ConfigError(f"connector module {module_path!r} cannot be imported: {e}") from e
        found = getattr(module, class_name, None)
        if not isinstance(found, type):
            raise ConfigError(f"module {module_path!r} has no class {class_name!r}")
        return found
