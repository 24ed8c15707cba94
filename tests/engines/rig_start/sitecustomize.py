"""Python finds this at start-up when the rig's folder is on PYTHONPATH, as it is for the engines' processes here.

With SPEC_TEST_FORKS set, SGLang forks its processes: each that is spawned imports SGLang anew, for 5 CPU seconds.
"""

import atexit
import gc
import os

gc.set_threshold(50_000, 20, 20)  # importing an engine takes a fifth less with fewer collections
atexit.register(gc.freeze)  # nor is there anything to find at the end
if "SPEC_TEST_FORKS" in os.environ:
    import multiprocessing

    multiprocessing.set_start_method = lambda *args, **kwargs: None
