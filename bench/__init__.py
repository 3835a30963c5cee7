"""Measurements of the layer, and the verdict over them."""

from netlayer.launch.interrupt import end_quietly_until_a_command_runs

end_quietly_until_a_command_runs()
