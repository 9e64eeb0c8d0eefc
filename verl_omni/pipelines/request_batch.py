"""Collate and split helpers for the engine's ``DiffusionRequestBatch``, for adapters that write their own ``forward``.

Adapters on ``VllmOmniPipelineBase`` need none of them. Legend: N prompts, L the longest row, n outputs a prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import sample_sde_window
from verl_omni.pipelines.diffusion_rollout_output import owned

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

_ROW_GROUPS = ("prompt_embeddings", "rl")
"""Metadata groups whose tensors and lists have one entry a row."""
_UNPROMOTED = (torch.uint16, torch.uint32, torch.uint64)


def collate_prompt_rows(
    prompts: Sequence[object],
    aliases: Sequence[str],
    default_value: Any,
    *,
    device: torch.device | str,
    field_name: str,
    pad_value: float = 0,
) -> tuple[Tensor | None, list[int] | None]:
    """Gather one row a prompt under the first of `aliases` that it has, padded on the right.

    A row is a list, a 1-D or a [1, L] tensor; the dtype is the rows' common one, as torch promotes (unsigned integers
    of more than 8 bits, which it does not, count as int64). A prompt without the field gets `default_value`. Returns
    (None, None) when no prompt has it and there is no default.

    Returns:
        rows [N, L] on `device`, and the N lengths before padding.

    Raises:
        ValueError: some prompts have the field and others do not; a row has another shape, holds no numbers, or holds
            integers that the common dtype, or int64, does not.
    """
    values = [_field(prompt, aliases, default_value) for prompt in prompts]
    if all(value is None for value in values):
        return None, None
    rows = []
    for i, value in enumerate(values):
        if value is None:
            raise ValueError(f"prompt {i} has no {field_name} while others do; give it to all of them, or to none")
        rows.append(_row(value, f"{field_name} of prompt {i}"))
    dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
    for i, row in enumerate(rows):
        if row.dtype != dtype and not row.is_floating_point() and not torch.equal(row.to(dtype).to(row.dtype), row):
            raise ValueError(f"{field_name} of prompt {i} holds integers that {dtype}, which others have, does not")
    moved = [row.to(device, dtype) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(moved, batch_first=True, padding_value=pad_value)
    return padded, [len(row) for row in rows]


def collate_prompt_mask(
    prompts: Sequence[object],
    aliases: Sequence[str],
    default_value: Any,
    *,
    device: torch.device | str,
    field_name: str,
    token_lengths: Sequence[int],
    target_seq_len: int,
) -> Tensor:
    """Bool mask [N, target_seq_len], true on valid tokens.

    A prompt's own mask, a row as in :func:`collate_prompt_rows`, must cover its `token_lengths` entries; a prompt
    without one has all of its tokens valid.

    Raises:
        ValueError: a mask is no row, or of another length than its tokens, or these are more than `target_seq_len`.
    """
    masks = torch.zeros(len(prompts), target_seq_len, dtype=torch.bool)
    for i, (prompt, length) in enumerate(zip(prompts, token_lengths, strict=True)):
        if length > target_seq_len:
            raise ValueError(f"prompt {i} has {length} tokens, above target_seq_len={target_seq_len}")
        value = _field(prompt, aliases, default_value)
        row = torch.ones(length) if value is None else _row(value, f"{field_name} of prompt {i}")
        if len(row) != length:
            raise ValueError(f"{field_name} of prompt {i} has {len(row)} entries for {length} tokens")
        masks[i, :length] = row.bool()
    return masks.to(device)


def sample_per_sample_sde_windows(
    *,
    sde_window_size: int | None,
    sde_window_range: tuple[int, int] | None,
    num_timesteps: int,
    batch_size: int,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    device: torch.device | str = "cpu",
) -> list[tuple[int, int]]:
    """One window ``(start, stop)`` a row; each row draws from its own generator where several are given.

    Raises ValueError when the window does not fit, or when there are not as many generators as rows.
    """
    generators = list(generator) if isinstance(generator, Sequence) else [generator] * batch_size
    if len(generators) != batch_size:
        raise ValueError(f"{len(generators)} generators for {batch_size} rows; give one a row, or one for all")
    return [
        sample_sde_window(
            sde_window_size=sde_window_size,
            sde_window_range=sde_window_range,
            num_timesteps=num_timesteps,
            generator=g,
            device=device,
        )
        for g in generators
    ]


def split_diffusion_output_by_request(
    result: DiffusionOutput, req: DiffusionRequestBatch, *, num_outputs_per_prompt: int
) -> list[DiffusionOutput]:
    """One output a request from the output of a whole batch.

    Payload, trajectory fields and the metadata groups ``prompt_embeddings`` and ``rl`` hold N·n rows in request order
    and are sliced; numbers in them, and other metadata, are shared by all. Every tensor and NumPy array of the slices
    owns its storage.

    Raises:
        ValueError: `num_outputs_per_prompt` is not positive, or a field has another number of rows.
    """
    if num_outputs_per_prompt < 1:
        raise ValueError(f"num_outputs_per_prompt={num_outputs_per_prompt} must be at least 1")
    total = req.num_reqs * num_outputs_per_prompt

    def cut(name: str, value: Any, start: int) -> Any:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {key: cut(f"{name}.{key}", item, start) for key, item in value.items()}
        if not isinstance(value, (list, tuple)) and getattr(value, "shape", ()) == ():
            return value
        if len(value) != total:
            raise ValueError(
                f"{name} has {len(value)} rows for {req.num_reqs} requests of {num_outputs_per_prompt} outputs each"
            )
        return owned(value[start : start + num_outputs_per_prompt])

    def one(index: int) -> DiffusionOutput:
        start = index * num_outputs_per_prompt
        output = result.output
        if isinstance(output, Mapping) and "payload" in output:
            metadata = dict(output.get("metadata") or {})
            metadata |= {name: cut(name, metadata[name], start) for name in _ROW_GROUPS if name in metadata}
            output = {**output, "payload": cut("payload", output["payload"], start), "metadata": metadata}
        else:
            output = cut("output", output, start)
        names = ("trajectory_latents", "trajectory_timesteps", "trajectory_log_probs", "trajectory_decoded")
        return dataclasses.replace(
            result, output=output, **{name: cut(name, getattr(result, name), start) for name in names}
        )

    return [one(i) for i in range(req.num_reqs)]


def _row(value: Any, name: str) -> Tensor:
    try:
        row = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is no row of numbers: {error}") from error
    row = row[0] if row.ndim == 2 and row.shape[0] == 1 else row
    if row.ndim != 1 or not len(row):
        raise ValueError(f"{name} has shape {list(row.shape)}; use a list, [L] or [1, L], not empty")
    if row.dtype not in _UNPROMOTED:
        return row
    if row.dtype is torch.uint64 and (row.long() < 0).any():
        raise ValueError(f"{name} holds integers of 2**63 or more; use integers that int64 holds")
    return row.long()


def _field(prompt: object, aliases: Sequence[str], default: Any) -> Any:
    if isinstance(prompt, Mapping):
        nested = prompt.get("additional_information")
        for source in (prompt, nested if isinstance(nested, Mapping) else {}):
            for name in aliases:
                if source.get(name) is not None:
                    return source[name]
    return default
