"""Python finds this at start-up when the rig's folder is on PYTHONPATH, as it is for the engines' processes here."""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)  # importing an engine takes a fifth less with fewer collections
atexit.register(gc.freeze)  # nor is there anything to find at the end
