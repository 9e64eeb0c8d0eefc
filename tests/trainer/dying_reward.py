"""A reward of 0, and the sudden death, in a certain step, of the run that asks for it."""

import os
import signal


def compute_score(request_id):
    if request_id.startswith(f"s{os.environ.get('DIE_IN_STEP')}-"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
