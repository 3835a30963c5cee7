"""Commands of the simulator: `simulate`, `step`, `sweep`, `arena`, `retransmit`."""
