"""A scoring function of the user's own: found in a file, and matched with what it is called with."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from verl_omni.workers.config.base import nearest

KEYWORDS = (
    "image",
    "solution_image",
    "prompt",
    "ground_truth",
    "data_source",
    "extra_info",
    "request_id",
    "uid",
)
"""What a scoring function may take; `solution_image` is another name of `image`."""


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The callable `name` of the Python file `path`, which is run once a process.

    The file's folder joins the end of the module search path, so that the file can import its neighbours. Raises
    ValueError if there is no such file, if it fails when it is run, or if it holds no callable of that name.
    """
    file = Path(path).expanduser().resolve()
    if not (file.is_file() and file.suffix == ".py"):
        raise ValueError(f"{file} is no .py file")
    module = _run(file)
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise ValueError(f"{name} of {file} is {function!r}, which cannot be called")
    near = nearest(name, [key for key, value in vars(module).items() if inspect.isfunction(value)])
    raise ValueError(f"{file} has no function {name}" + (f"; did you mean {near}?" if near else ""))


def _run(file: Path) -> Any:
    module_name = f"_user_function_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does is the user's code
        del sys.modules[module_name]
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def taken_keywords(function: Callable[..., Any], further: Collection[str] = ()) -> tuple[str, ...]:
    """Those of `KEYWORDS` and `further` with which `function` is to be called; all if it takes ``**kwargs``.

    Raises ValueError if it needs an argument that is none of them, or does not take one of `further`.
    """
    if clash := [name for name in further if name in KEYWORDS]:
        raise ValueError(f"{clash[0]} is given by the trainer; use another name")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the arguments of {function!r} cannot be read: {error}") from error
    offered = (*KEYWORDS, *further)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variadic and parameter.default is parameter.empty and parameter.name not in named & set(offered):
            raise ValueError(
                f"the function needs {parameter}, which it is not called with; "
                f"it is called by keyword, with those of {', '.join(offered)} that it takes"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    if lost := [name for name in further if name not in named]:
        raise ValueError(f"the function takes no {lost[0]}")
    return tuple(name for name in offered if name in named)
