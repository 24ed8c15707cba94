import time
from types import SimpleNamespace


class Req:
    def __init__(self):
        self.time_stats = SimpleNamespace(forward_entry_time=time.perf_counter())
        self.spec_correct_drafts_histogram = []

    def update_spec_correct_drafts_histogram(self, num_correct_drafts):
        histogram = self.spec_correct_drafts_histogram
        histogram += [0] * (num_correct_drafts + 1 - len(histogram))
        histogram[num_correct_drafts] += 1
