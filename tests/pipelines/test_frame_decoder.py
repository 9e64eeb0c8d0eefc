"""The single-frame decoder against the whole video VAE."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from verl_omni.pipelines.qwen_image.frame_decoder import FrameDecoder


@pytest.mark.parametrize("size", [(8, 8), (6, 10)])
def test_a_frame_decodes_as_the_video_vae_decodes_it(size):
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
    ).eval()
    latents = torch.randn(3, 16, 1, *size)
    with torch.no_grad():
        want = vae.decode(latents, return_dict=False)[0]
        decoder = FrameDecoder(vae)
        torch.testing.assert_close(decoder(latents), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(vae.decode(latents, return_dict=False)[0], want, atol=0, rtol=0)  # left as it was
    assert not any(isinstance(module, torch.nn.Conv3d) for module in decoder.modules())
    assert sum(b.numel() for b in decoder.buffers()) < sum(p.numel() for p in vae.decoder.parameters()) / 2
