"""Classes by (architecture, algorithm): rollout adapters, and the training side of the models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ClassVar, TypeVar

T = TypeVar("T", bound=type)


class Registry:
    """Class-level registry; `architecture` is ``_class_name`` of a checkpoint's ``model_index.json``.

    Each kind of class has a registry of its own: a base class that sets the three attributes below.
    """

    _kind: ClassVar[str]
    """What is registered, for error messages."""
    _built_in: ClassVar[tuple[str, ...]]
    """Modules that register the classes of this package when they are imported."""
    _classes: ClassVar[dict[tuple[str, str], type]]

    @classmethod
    def register(cls, architecture: str, algorithm: str = "flow_grpo") -> Callable[[T], T]:
        """Class decorator. Raises ValueError if another class holds the place already.

        A user's class may take the place of a built-in one by registering before that is looked up.
        """

        def decorate(new: T) -> T:
            present = cls._classes.setdefault((architecture, algorithm), new)
            if new.__module__ in cls._built_in and present is not new:
                return new  # imported late; a user's class has taken its place, as it may
            if (present.__module__, present.__qualname__) != (new.__module__, new.__qualname__):
                raise ValueError(
                    f"({architecture!r}, {algorithm!r}) is registered to {_path(present)} already; "
                    f"register {_path(new)} under another algorithm name"
                )
            cls._classes[architecture, algorithm] = new
            return new

        return decorate

    @classmethod
    def get_class(cls, architecture: str, algorithm: str = "flow_grpo") -> type:
        """The registered class. Raises ValueError naming what is registered."""
        key = (architecture, algorithm)
        if key not in cls._classes:
            for module in cls._built_in:
                importlib.import_module(module)
        if key not in cls._classes:
            known = ", ".join(f"{a}/{b}" for a, b in sorted(cls._classes))
            raise ValueError(
                f"no {cls._kind} for architecture {architecture!r} with algorithm {algorithm!r}; there is {known}. "
                "Register your own in a module named by actor_rollout_ref.rollout.external_lib"
            )
        return cls._classes[key]


class AdapterRegistry(Registry):
    """Rollout adapters."""

    _kind = "rollout adapter"
    _built_in = ("verl_omni.pipelines.qwen_image.rollout", "verl_omni.pipelines.sd3.rollout")
    _classes: ClassVar[dict[tuple[str, str], type]] = {}

    @classmethod
    def get_pipeline_path(cls, architecture: str, algorithm: str = "flow_grpo") -> str:
        """Import path ``module.Class``, by which the engine process finds the adapter. Raises ValueError."""
        return _path(cls.get_class(architecture, algorithm))


def _path(registered: type) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"
