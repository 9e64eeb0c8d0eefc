"""Seeded random workloads against one real engine, every result checked against the contracts of a rollout.

    python -m verl_omni.testing.soak --family qwen_image --mode step_wise --requests 200 --seed 0

* :mod:`~verl_omni.testing.soak.workload` makes the workload of a seed: requests, when they come, what befalls them.
* :mod:`~verl_omni.testing.soak.faults` are the ways in which some of them are wrong; ``adapters`` plant those that are
  no fault of a request.
* :mod:`~verl_omni.testing.soak.drive` plays a workload to an engine, :mod:`~verl_omni.testing.soak.soak` all of them,
  and :mod:`~verl_omni.testing.soak.checks` says what of the outcome breaks a contract.
"""
