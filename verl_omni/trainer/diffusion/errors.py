"""What ends a training run."""


class TrainingError(RuntimeError):
    """The run can't go on; the message says why, and what to change."""
