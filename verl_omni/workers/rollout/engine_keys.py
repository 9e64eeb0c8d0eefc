"""Which options the installed engine takes, read from its source without importing it (an import takes seconds).

The engine drops options that it does not know, without a word. It even drops some fields of its own config class, as
its launcher builds the stage config of a diffusion model from a fixed list of options. That list is the truth.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_omni.utils.text import one_line
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.config.base import integer

_LAUNCHER = ("engine/async_omni_engine.py", "_create_default_diffusion_stage_cfg")
_CONFIG = ("diffusion/data.py", "OmniDiffusionConfig")
_TIMEOUTS = {"stage_init_timeout", "init_timeout"}
"""Seconds, integers."""
_START_KEYS = {*_TIMEOUTS, "log_stats"}
"""What the launcher takes beside the options of a stage."""
_PREFIX = f"{DiffusionRolloutConfig.KEY}.engine_kwargs.vllm_omni"


@functools.cache
def engine_keys() -> frozenset[str]:
    """Names of all options that reach the engine. Raises :class:`ConfigError` when no engine is installed."""
    spec = importlib.util.find_spec("vllm_omni")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("vllm-omni is not installed; rollouts need it (extra 'gpu', or requirements/ for CPU)")
    root = Path(spec.submodule_search_locations[0])
    launcher = _definition(root, *_LAUNCHER)
    if launcher is not None:
        return frozenset(_options_read(launcher)) | _START_KEYS
    config = _definition(root, *_CONFIG)  # another version of the engine: the best that is left
    body = config.body if isinstance(config, ast.ClassDef) else []
    return (
        frozenset(f.target.id for f in body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name))
        | _START_KEYS
    )


def check_engine_values(options: Mapping[str, Any]) -> None:
    """Have the engine check the values of `options` as it does when it starts; imports the engine, loads no model.

    Raises :class:`ConfigError` with what the engine says, and of which option if it says the same of that one alone.
    """
    for key in _TIMEOUTS & options.keys():
        integer(f"{_PREFIX}.{key}", options[key], low=1, null="the engine's default")
    error = _refusal(options)
    if error is None:
        return
    said = _said(error)
    alone = ({key: value} for key, value in options.items())
    refused = next((one for one in alone if (why := _refusal(one)) is not None and _said(why) == said), dict(options))
    other = "another value" if len(refused) == 1 else "other values"
    raise ConfigError(
        f"{_PREFIX}: the engine rejects {refused}: {said}; write {other}, or null for the engine's default"
    ) from error


def _refusal(options: Mapping[str, Any]) -> Exception | None:
    """What the engine raises for these options."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    launcher = getattr(AsyncOmniEngine, _LAUNCHER[1], None)
    try:
        OmniDiffusionConfig.from_kwargs(**options)
        if launcher is not None:  # it reads the sizes of parallel groups, which the config class does not
            OmniDiffusionConfig.from_kwargs(**launcher(dict(options))[0]["engine_args"])
    except Exception as error:  # of any kind: it trusts most types
        return error
    return None


def _said(error: Exception) -> str:
    return one_line(error) or repr(error)


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
