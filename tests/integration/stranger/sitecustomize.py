"""Python imports this at the start of every process of a test's runs.

Importing torch and transformers, most of what a short run does, takes a fifth less with fewer collections.
"""

import gc

gc.set_threshold(50_000, 20, 20)
