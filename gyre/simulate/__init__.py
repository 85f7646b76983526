"""The scheduler under a virtual clock: the cluster's model, workloads, bounds, comparisons, pictures. Pure."""
