"""What ends a training run."""

MAX_SKIPPED = 3
"""Training steps in a row without a single update. One bad batch may happen; three are no chance, and each costs what a
good one does."""


class TrainingError(RuntimeError):
    """The run can't go on; the message says why, and what to change."""


class SkippedSteps:
    """Ends a run that learns nothing any more, as all gradients are NaN or infinite."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def see(self, step: int, skipped: float) -> None:
        """Of training step `step` a share of `skipped` optimizer steps were left out.

        Raises :class:`TrainingError` if it was all of them, and in the `MAX_SKIPPED` - 1 steps before too.
        """
        self._in_a_row = self._in_a_row + 1 if skipped == 1 else 0
        if self._in_a_row == MAX_SKIPPED:
            raise TrainingError(
                f"nothing was learnt in steps {step + 1 - MAX_SKIPPED} to {step}: all gradients were NaN or infinite. "
                "Look at the learning rate (a lower actor_rollout_ref.actor.optim.lr, if actor/grad_norm or "
                "actor/kl_loss rose before), at the dtype (actor_rollout_ref.actor.fsdp_config.param_dtype=float32), "
                "and at the reward (reward/min, reward/max) and the loss, if they are your own"
            )
