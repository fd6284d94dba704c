"""One folder a GPU: the schedules found for it by tuning, and the kernels built from them. Data only."""
