import time
from types import SimpleNamespace


class Req:
    def __init__(self, rid, output_ids):
        self.rid, self.output_ids = rid, output_ids
        self.time_stats = SimpleNamespace(forward_entry_time=time.perf_counter())
        self.spec_correct_drafts_histogram = []
        self.customized_info = None
        """Lists with a value for each token; any list may be missing, and tokens are sent with their values."""

    def update_spec_correct_drafts_histogram(self, num_correct_drafts):
        histogram = self.spec_correct_drafts_histogram
        histogram += [0] * (num_correct_drafts + 1 - len(histogram))
        histogram[num_correct_drafts] += 1

    def update_spec_cap_lens_histogram(self, cap_len):
        pass
