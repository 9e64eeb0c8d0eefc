"""Which options the installed engine takes, read from its source without importing it (an import takes seconds).

The engine drops options that it does not know, without a word. It even drops some fields of its own config class, as
its launcher builds the stage config of a diffusion model from a fixed list of options. That list is the truth.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_omni.utils.text import one_line
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.config.base import choice, flag, integer

_LAUNCHER = ("engine/async_omni_engine.py", "_create_default_diffusion_stage_cfg")
_CONFIG = ("diffusion/data.py", "OmniDiffusionConfig")
_PARALLEL = ("diffusion/data.py", "DiffusionParallelConfig")
_TIMEOUTS = {"stage_init_timeout", "init_timeout"}
"""Seconds, integers."""
_POSITIVE = {*_TIMEOUTS, "num_weight_load_threads"}
"""Integers that the engine takes unread, and fails on later."""
_GROUPS = (
    ("num_gpus",),
    ("hsdp_shard_size", "hsdp_replicate_size"),
    (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "cfg_parallel_size"),
        *("sequence_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree"),
    ),
)
"""Options that are a number of devices, or whose product is one, or more than that."""
_MAX_DEVICES = 2**20
"""The launcher makes a list of all devices before anything asks whether they are there."""
_START_FLAG, _EXECUTOR = "log_stats", "distributed_executor_backend"
_START_KEYS = {*_TIMEOUTS, _START_FLAG}
"""What the launcher takes beside the options of a stage."""
_DEFAULT = "the engine's default"
_PREFIX = f"{DiffusionRolloutConfig.KEY}.engine_kwargs.vllm_omni"


@functools.cache
def engine_keys() -> frozenset[str]:
    """Names of all options that reach the engine. Raises :class:`ConfigError` when no engine is installed."""
    root = _root()
    launcher = _definition(root, *_LAUNCHER)
    if launcher is not None:
        return frozenset(_options_read(launcher)) | _START_KEYS
    # another version of the engine: the best that is left
    return frozenset(name for name, _ in _fields(root, *_CONFIG)) | _START_KEYS


@functools.cache
def engine_flags() -> frozenset[str]:
    """Names of the options that are true or false: by the engine's configs, or by the default that its launcher has."""
    root = _root()
    fields = [*_fields(root, *_CONFIG), *_fields(root, *_PARALLEL)]
    launcher = _definition(root, *_LAUNCHER)
    defaults = () if launcher is None else _options_with_a_bool(launcher)
    return frozenset((*(name for name, kind in fields if kind == "bool"), *defaults, _START_FLAG))


def typed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, none of them null, with the types that the engine takes unread: it goes by the truth of any value.

    Flags may come as "true" and "false", integers as strings. Raises :class:`ConfigError` for what is neither, and for
    parallel groups of more devices than there can be.
    """
    _check_devices(options)
    typed = dict(options)
    for key, value in options.items():
        name = f"{_PREFIX}.{key}"
        if key in engine_flags():
            typed[key] = flag(name, value, null=_DEFAULT)
        elif key in _POSITIVE:
            typed[key] = integer(name, value, low=1, null=_DEFAULT)
        elif key == _EXECUTOR and "." not in str(value):  # with a dot: import path of an executor's class
            typed[key] = choice(name, value, ("uni", "mp"), null=_DEFAULT)
    return typed


def _check_devices(options: Mapping[str, Any]) -> None:
    nested = options.get("parallel_config")
    given = {**options, **(nested if isinstance(nested, Mapping) else {})}
    for group in _GROUPS:
        sizes: dict[str, int] = {}
        for key in group:
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # the engine says what is wrong with it
                sizes[key] = max(1, int(given[key]))
        if math.prod(sizes.values()) > _MAX_DEVICES:
            raise ConfigError(
                f"{_PREFIX}: {sizes} asks for more than {_MAX_DEVICES} devices; write smaller sizes, or null for "
                f"{_DEFAULT}"
            )


def check_engine_values(options: Mapping[str, Any]) -> None:
    """Have the engine check the values of `options` as it does when it starts; imports the engine, loads no model.

    Raises :class:`ConfigError` with what the engine says, and of which option if it says the same of that one alone.
    """
    options = typed_options(options)
    error = _refusal(options)
    if error is None:
        return
    said = _said(error)
    alone = ({key: value} for key, value in options.items())
    refused = next((one for one in alone if (why := _refusal(one)) is not None and _said(why) == said), dict(options))
    other = "another value" if len(refused) == 1 else "other values"
    raise ConfigError(
        f"{_PREFIX}: the engine rejects {refused}: {said}; write {other}, or null for {_DEFAULT}"
    ) from error


def _refusal(options: Mapping[str, Any]) -> Exception | None:
    """What the engine raises for these options."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    launcher = getattr(AsyncOmniEngine, _LAUNCHER[1], None)
    try:
        config = OmniDiffusionConfig.from_kwargs(**options)
        if options.get(_EXECUTOR) is not None:
            DiffusionExecutor.get_class(config)
        if launcher is not None:  # it reads the sizes of parallel groups, which the config class does not
            OmniDiffusionConfig.from_kwargs(**launcher(dict(options))[0]["engine_args"])
    except Exception as error:  # of any kind: it trusts most types
        return error
    return None


def _said(error: Exception) -> str:
    return one_line(error) or repr(error)


def _root() -> Path:
    """Where the engine's source lies."""
    spec = importlib.util.find_spec("vllm_omni")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("vllm-omni is not installed; rollouts need it (extra 'gpu', or requirements/ for CPU)")
    return Path(spec.submodule_search_locations[0])


def _fields(root: Path, file: str, name: str) -> Iterator[tuple[str, str]]:
    """Name and annotation of each field of a class."""
    found = _definition(root, file, name)
    for item in found.body if isinstance(found, ast.ClassDef) else ():
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, ast.unparse(item.annotation)


def _definition(root: Path, file: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    path = root / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    kinds = (ast.ClassDef, ast.FunctionDef)
    return next((node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name), None)


def _options_read(function: ast.AST) -> Iterator[str]:
    """Every ``"x"`` of ``kwargs.get("x")`` and ``kwargs["x"]`` in the body."""
    for node in ast.walk(function):
        match node:
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=source), attr="get"), args=[ast.Constant(value=str(key)), *_]
                )
                | ast.Subscript(value=ast.Name(id=source), slice=ast.Constant(value=str(key)))
            ) if source in ("kwargs", "normalized_kwargs"):
                yield key


def _options_with_a_bool(function: ast.AST) -> Iterator[str]:
    """Every ``"x"`` of ``kwargs.get("x", False)`` and ``kwargs.get("x", True)`` in the body."""
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), ast.Constant(value=True | False)]
            ):
                yield key
