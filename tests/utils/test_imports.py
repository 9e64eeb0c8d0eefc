"""Imports of large libraries: what the garbage collector does meanwhile, after them, and at the end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from verl_omni.utils.imports import without_collecting

CYCLE = """
from contextlib import nullcontext
from verl_omni.utils.imports import without_collecting
class Collected:
    def __init__(self): self.me = self
    def __del__(self): print("collected")
with {context}(): ring = Collected()
"""


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector as a process has it by itself, and afterwards as it was."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()
    if frozen:
        gc.freeze()


def test_it_pauses_during_the_import_and_goes_on_also_if_that_fails(collector):
    enabled = []

    def fail() -> None:
        with without_collecting():
            enabled.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert [*enabled, gc.isenabled()] == [False, True]


def test_what_was_off_stays_off(collector):
    gc.disable()
    with without_collecting():
        pass
    assert not gc.isenabled()


def test_what_came_is_walked_by_full_collections_only_and_can_be_collected(collector):
    with without_collecting():
        came: list[object] = [[]]
    assert any(found is came for found in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_stays_so(collector):
    gc.freeze()
    with without_collecting():
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize(("context", "printed"), [("nullcontext", "collected\n"), ("without_collecting", "")])
def test_at_the_end_of_the_process_nothing_is_collected(context, printed):
    code = CYCLE.format(context=context)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == printed
