"""Step time, memory and exposed communication of a job on GPUs that are not there: predicted, never measured.

An event model of the trainer's own schedules (`netlayer.workload.schedule`) with operator times from at most six fitted
numbers a generation of GPUs, the arena in which it stands beside other estimators on public rows, and the search over
layouts. What a job is (size, FLOPs, memory, bytes on the wire) is asked of `netlayer.workload` alone. Nothing imports
torch.
"""
