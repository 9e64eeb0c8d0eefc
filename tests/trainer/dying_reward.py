"""A reward of 0, and sudden deaths in certain steps: of the run that asks for it, or of its rollout server."""

import os
import signal

from tests.workers.processes import server_process

_killed: list[int] = []


def compute_score(request_id):
    if request_id.startswith(f"s{os.environ.get('DIE_IN_STEP')}-"):
        os.kill(os.getpid(), signal.SIGKILL)
    if request_id.startswith(f"s{os.environ.get('KILL_SERVER_IN_STEP')}-") and not _killed:
        _killed.append(server_process("vllm_omni_server_0_0"))
        os.kill(_killed[0], signal.SIGKILL)
    return 0.0
