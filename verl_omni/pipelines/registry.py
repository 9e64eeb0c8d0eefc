"""Adapters by (architecture, algorithm)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ClassVar, TypeVar

T = TypeVar("T", bound=type)

BUILT_IN = ("verl_omni.pipelines.qwen_image.rollout", "verl_omni.pipelines.sd3.rollout")
"""Modules that register the adapters of this package when they are imported."""


class AdapterRegistry:
    """Class-level registry; `architecture` is ``_class_name`` of a checkpoint's ``model_index.json``."""

    _adapters: ClassVar[dict[tuple[str, str], type]] = {}

    @classmethod
    def register(cls, architecture: str, algorithm: str = "flow_grpo") -> Callable[[T], T]:
        """Class decorator. Raises ValueError if another class holds the place already.

        A user's class may take the place of a built-in one by registering before that is looked up.
        """

        def decorate(adapter: T) -> T:
            present = cls._adapters.setdefault((architecture, algorithm), adapter)
            if adapter.__module__ in BUILT_IN and present is not adapter:
                return adapter  # imported late; a user's adapter has taken its place, as it may
            if (present.__module__, present.__qualname__) != (adapter.__module__, adapter.__qualname__):
                raise ValueError(
                    f"({architecture!r}, {algorithm!r}) is registered to {_path(present)} already; "
                    f"register {_path(adapter)} under another algorithm name"
                )
            cls._adapters[architecture, algorithm] = adapter
            return adapter

        return decorate

    @classmethod
    def get_class(cls, architecture: str, algorithm: str = "flow_grpo") -> type:
        """The adapter class. Raises ValueError naming what is registered."""
        key = (architecture, algorithm)
        if key not in cls._adapters:
            for module in BUILT_IN:
                importlib.import_module(module)
        if key not in cls._adapters:
            known = ", ".join(f"{a}/{b}" for a, b in sorted(cls._adapters))
            raise ValueError(
                f"no rollout adapter for architecture {architecture!r} with algorithm {algorithm!r}; there is {known}. "
                "Register your own in a module named by actor_rollout_ref.rollout.external_lib"
            )
        return cls._adapters[key]

    @classmethod
    def get_pipeline_path(cls, architecture: str, algorithm: str = "flow_grpo") -> str:
        """Import path ``module.Class``, by which the engine process finds the adapter. Raises ValueError."""
        return _path(cls.get_class(architecture, algorithm))


def _path(adapter: type) -> str:
    return f"{adapter.__module__}.{adapter.__qualname__}"
