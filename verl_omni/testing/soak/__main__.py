import sys

from verl_omni.testing.soak.cli import main

if __name__ == "__main__":  # a worker process that is spawned imports this module again
    sys.exit(main())
