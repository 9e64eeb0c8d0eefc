"""User modules that register adapters, losses or scorers when they are imported."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig


def import_external_lib(name: str) -> None:
    """Import a module, by name or by the path of its .py file, so that it registers its adapters.

    A file's folder is added to the module search path of this process and of those it starts, as the engine imports the
    adapter by its module's name. Raises :class:`ConfigError` if the import fails.
    """
    key = f"{DiffusionRolloutConfig.KEY}.external_lib={name!r}"
    path = Path(name).expanduser().resolve()
    is_file = name.endswith(".py") or "/" in name
    if is_file and not (path.is_file() and path.suffix == ".py" and path.stem.isidentifier()):
        raise ConfigError(f"{key}: {path} is no .py file whose name can be imported")
    module_name = path.stem if is_file else name
    if is_file and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(path.parent))))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does at import is the user's code
        raise ConfigError(f"{key} cannot be imported: {type(error).__name__}: {error}") from error
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if is_file and found != path:
        raise ConfigError(f"{key}: the module name {module_name} already means {found}; rename the file")
