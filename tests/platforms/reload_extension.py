"""A worker extension for the tests: loads the transformer's weights again, as a weight update of a trainer does."""

from safetensors.torch import load_file


class ReloadExtension:
    """Mixed into the engine's worker class; the engine imports it by name in the worker's process."""

    def reload_transformer(self, path: str) -> int:
        """Loads a diffusers transformer file into the running pipeline and returns how many tensors it took."""
        weights = load_file(path)
        loaded = self.model_runner.pipeline.load_weights((f"transformer.{name}", t) for name, t in weights.items())  # type: ignore[attr-defined]
        return len(loaded)
