"""Device memory: what a row of a forward takes, what is free, and what happens when that was not enough.

**Forecast.** Where the plan gives no ``rows_per_forward``, the rows of a batch share one transformer forward if they
fit into the free memory by :func:`block_bytes`. If not, a forward takes a power of two of them: shapes are few, and a
little more or less free memory changes nothing.

**Error.** A forecast can be wrong, and other processes take memory too. What runs out of memory runs again in halves,
down to one row, and what comes after starts with the smaller number (:class:`RowLimit`). Forwards and decodes draw no
random numbers, so the rows come out as they would have. Where several devices run a forward together, nothing is
repeated: one of them would wait for the others in another forward than theirs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
import torch

from verl_omni.pipelines.params import RequestError
from verl_omni.pipelines.rows import count_rows, rollout_of, text_lengths

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.utils import StepRequestState

logger = logging.getLogger(__name__)

SAFETY_SHARE = 0.1
"""Of the free memory, what no forecast may take: gaps between blocks that the allocator cannot use, and workspaces of
matrix products and attention."""
STEP_LATENTS = 8
"""Float32 tensors of the size of all latents that are alive in a step at its peak: before and after, a second time for
guidance, both velocities and their temporaries, mean, and noise."""
OUT_OF_MEMORY = ("out of memory", "outofmemory", "can't allocate memory", "not enough memory", "status_alloc_failed")
"""What errors other than torch.OutOfMemoryError say, in small letters: torch on a CPU (Linux, Windows), drivers,
libraries and the compiler."""


def block_bytes(*, width: int, feed_forward: int, tokens: int, element_bytes: int) -> int:
    """Most bytes that the activations of one row take in a dual-stream DiT that is not compiled.

    `width` is that of a token, `feed_forward` that of the MLP's hidden layer, `tokens` those of image and text.
    A block leaves nothing behind but the two residual streams, so a deep model takes no more than one block. Counted in
    tensors of one `width` a token, there are alive

    - in attention 15: the residual streams (1) and their modulated form (1), the packed product of q, k and v (3), q
      and k normed and rotated (2), q, k and v of both streams joined (3), for the kernel under a text mask the valid
      tokens of q, k, v and of the output (4), and the output (1).
    - in the MLP 5, and 2 of `feed_forward`: the residual streams as they came, which the caller holds, and after
      attention (2), both modulated forms (2), the output of attention (1); the hidden layer as a matrix product and
      what a LoRA adds to it, or before and after the activation (2).

    A compiled block holds less, as does one without LoRA or mask: down to about half. Not counted are modulation
    ([B, width]), rotary tables, and scores of an attention kernel that writes them out.
    """
    return tokens * element_bytes * max(15 * width, 5 * width + 2 * feed_forward)


def rows_that_fit(rows: int, *, row_cost: int, available: float) -> int:
    """`rows` if they all fit into `available` at `row_cost` each; else the power of two that does, at least 1."""
    if rows * row_cost <= available:
        return rows
    return 1 << max(0, int(available // row_cost).bit_length() - 1) if available > 0 else 1


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device`.

    On a CUDA device: what the driver has left, and what torch has taken from it and not handed out, but for private
    pools. On a CPU: what the machine has available, and the container, if it has a limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        idle = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        ever = stats["reserved_bytes.all.allocated"], stats["reserved_bytes.all.freed"]
        return free + idle - _idle_in_private_pools(device, *ever)
    contained = container_memory()
    available = int(psutil.virtual_memory().available)
    return available if contained is None else min(available, contained)


@functools.lru_cache(maxsize=1)
def _idle_in_private_pools(device: torch.device, taken: int, returned: int) -> int:
    """Bytes that torch has taken for private pools and not handed out: they are of no use to anything else.

    Those of CUDA graphs lie idle between replays, and what the pool of the weights has left over under sleep mode is
    not even mapped. To ask takes milliseconds, so this is done only where torch has `taken` more bytes from the driver
    since then, or `returned` some; both count from the start of the process.
    """
    if torch.cuda.get_allocator_backend() != "native":  # the other one has no snapshots
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the memory limit of this container (cgroup version 2 or 1); None if there is no limit.

    File pages that can be dropped count as left: a checkpoint that has just been read leaves many.
    """
    versions = [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
    for limit, used in versions:
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
            stat = (root / limit).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # not this version; or "max"
            continue
        return left + int(dict(line.split() for line in stat.splitlines()).get("inactive_file", 0))
    return None


def kept_bytes(states: Sequence[StepRequestState]) -> int:
    """Bytes that the rows of `states` come to take beside a forward: texts, latents of a step, latents recorded."""
    rollouts = [rollout_of(state) for state in states]
    rows = [row for rollout in rollouts for row in rollout.rows]
    windows = [row.window for row in rows if row.record]
    # A recorded tensor is that of the whole batch, which stays while any of its rows needs it.
    recorded = max(stop for _, stop in windows) - min(start for start, _ in windows) + 1 if windows else 0
    latents = rollouts[0].latents[0].numel() * torch.float32.itemsize * (STEP_LATENTS + recorded)
    text = sum(
        max((sum(tensor.nbytes for tensor in prompt.values()) for prompt in side if prompt is not None), default=0)
        for side in ([rollout.cond for rollout in rollouts], [rollout.uncond for rollout in rollouts])
    )
    return len(rows) * (latents + text)


def forecast_rows(
    states: Sequence[StepRequestState],
    row_bytes: Callable[[int], int],
    *,
    fuse_guidance: bool,
    most: float,
    device: torch.device,
    devices: int,
) -> int:
    """Rows of prepared `states` that may share a transformer forward; with `fuse_guidance`, guided ones count twice.

    `row_bytes` gives the bytes of one row by its text tokens, `most` bounds the bytes of a forward, `devices` are those
    of the engine. The free memory is asked for once, and not at all for a single row.
    """
    rows = count_rows(states) + (count_rows(states, guided=True) if fuse_guidance else 0)
    if rows == 1:
        return 1
    available = min((1 - SAFETY_SHARE) * free_memory(device) - kept_bytes(states), most)
    if devices > 1:  # they run each forward together, so they must split alike
        least = torch.tensor(available, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        available = least.item()
    return rows_that_fit(rows, row_cost=row_bytes(max(text_lengths(states))), available=available)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)


def give_back(device: torch.device) -> None:
    """Give what torch keeps but does not use back to the device, where a retry or another library may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Part(Protocol):
    """Rows that run together: a forward, or a tensor of rows."""

    def __len__(self) -> int: ...

    def split(self, rows: int, /) -> Sequence[Any]:
        """The same in parts of `rows` rows."""


P = TypeVar("P", bound=Part)
T = TypeVar("T")


@dataclass(kw_only=True)
class RowLimit:
    """What may run at once by the errors so far, and the rule for what runs out of memory: again, in halves.

    A row counts by its cost, in a unit that grows with the memory it takes: what large images taught binds small ones
    no more than it should.
    """

    name: str
    """What runs."""
    setting: str
    """What to write to start with a limit; {rows} stands for it."""
    remedy: str
    """What to ask for instead if not even one row fits."""
    device: torch.device
    devices: int
    """Devices that run each part together."""
    on_halving: Callable[[], None]
    most: float = math.inf
    """Cost of what may run at once."""

    @property
    def repeats(self) -> bool:
        """Whether what failed here may run again: not if other devices wait for this one in the same forward."""
        return self.devices == 1

    def forget(self) -> None:
        """Start anew: the memory may be another one."""
        self.most = math.inf

    def run(
        self, parts: Iterable[P], run: Callable[[P], T], *, cost: Callable[[P], int], describe: Callable[[P], str]
    ) -> list[tuple[P, T]]:
        """Results of `run` for `parts`, in order, each beside the part that it belongs to.

        A part above the limit is split first. One that runs out of memory is repeated in halves, and it alone; the
        smaller number is the limit from then on. `cost` gives the cost of one row of a part, `describe` says what its
        rows are.

        Raises :class:`RequestError` where one row alone runs out of memory, :class:`torch.OutOfMemoryError` where more
        do on several devices, and what `run` raises otherwise.
        """
        waiting, done = deque(parts), []
        while waiting:
            part = waiting.popleft()
            rows = rows_that_fit(len(part), row_cost=cost(part), available=self.most)
            if rows < len(part):
                waiting.extendleft(reversed(part.split(rows)))
                continue
            try:
                done.append((part, run(part)))
                continue
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # The error is gone by now, and with it its traceback, which held the tensors of what failed.
            self._halve(len(part), cost(part), describe(part), reason)
            waiting.appendleft(part)
        return done

    def _halve(self, rows: int, cost: int, described: str, reason: str) -> None:
        give_back(self.device)
        if rows == 1:
            raise RequestError(
                f"{self.name} ran out of memory over one row alone ({described}): ask for {self.remedy}, "
                f"or use a device with more memory; {reason}"
            )
        most = (rows + 1) // 2 * cost
        half = rows_that_fit(rows, row_cost=cost, available=most)
        setting = self.setting.format(rows=half)
        if not self.repeats:
            raise torch.OutOfMemoryError(
                f"{self.name} ran out of memory over {rows} rows ({described}), and is not repeated, as "
                f"{self.devices} devices run it together; write {setting}: {reason}"
            )
        self.most = most
        self.on_halving()
        logger.warning(
            "%s ran out of memory over %d rows (%s) and is repeated with %d at a time, as is what follows; "
            "write %s to start with that: %s",
            self.name, rows, described, half, setting, reason,
        )  # fmt: skip


def forward_limit(device: torch.device, on_halving: Callable[[], None], *, devices: int = 1) -> RowLimit:
    """The limit of transformer forwards; cost in bytes."""
    return RowLimit(
        name="a transformer forward",
        setting="rollout.engine_kwargs.vllm_omni.rows_per_forward={rows}",
        remedy="a smaller height and width or a shorter prompt",
        device=device,
        devices=devices,
        on_halving=on_halving,
    )


def decode_limit(device: torch.device, on_halving: Callable[[], None], *, devices: int = 1) -> RowLimit:
    """The limit of the VAE's decodes; cost in pixels."""
    return RowLimit(
        name="decoding",
        setting="decode_rows = {rows} in a subclass of the adapter",
        remedy="a smaller height and width or output_type=latent, or start with engine_kwargs.vllm_omni.vae_use_tiling",
        device=device,
        devices=devices,
        on_halving=on_halving,
    )
