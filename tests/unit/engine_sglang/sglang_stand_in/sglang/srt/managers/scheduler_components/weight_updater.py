class SchedulerWeightUpdaterManager:
    def __init__(self, scheduler):
        self.scheduler, self.offload_tags = scheduler, set()

    def release_memory_occupation(self, request):
        self.offload_tags.add("weights")
