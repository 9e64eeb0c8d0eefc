"""Qwen-Image with engines that die once in certain training steps, amid the denoising: a module for external_lib."""

import os
import signal
from pathlib import Path

from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase
from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout
from verl_omni.pipelines.qwen_image.training import QwenImageTraining

ARCHITECTURE, ALGORITHM = "QwenImagePipeline", "dying"
DiffusionModelBase.register(ARCHITECTURE, ALGORITHM)(QwenImageTraining)


@VllmOmniPipelineBase.register(ARCHITECTURE, ALGORITHM)
class DyingQwenImage(QwenImageRollout):
    """Dies in each training step of which there is a file in the folder ``$DEATHS``, such as ``s3``."""

    def denoise_step(self, input_batch, **kwargs):
        (first, *_) = kwargs["states"]
        self._die(first.request_id.partition("-")[0], first.step_index)
        return super().denoise_step(input_batch, **kwargs)

    def _die(self, training_step: str, step: int) -> None:
        death = Path(os.environ.get("DEATHS", "/nowhere")) / training_step
        if step == 1 and death.is_file():
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
