"""The fabric: a CLOS graph, its ECMP, the flows of a training job on it, and the load they make."""
