"""Facts of a job, counted without running it: size, stages, schedules, FLOPs, memory, and bytes on the wire.

The one home of these facts: topology, congestion, collectives, trainer and bench ask here. Nothing imports torch.
Modules are imported by name, and nothing is re-exported: `netlayer.config.tree` takes its presets from here, and a
command that reads a configuration would load all of it.
"""
