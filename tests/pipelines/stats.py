"""Statistics with a value in every field."""

from verl_omni.pipelines.stats import RolloutStats

STATS = RolloutStats(
    batch_sizes={16: 3, 1: 2},
    waves=2,
    encodes_requested=5,
    encodes_computed=3,
    stage_s={"denoise": 1.5, "decode": 0.25},
    compiled_graphs=4,
    out_of_memory=1,
)
