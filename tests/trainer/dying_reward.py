"""A reward of 0, and the sudden death of the run that asks for it in a certain step."""

import os
import signal


def compute_score(request_id):
    if request_id.startswith(f"s{os.environ.get('DIE_IN_STEP')}-"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
