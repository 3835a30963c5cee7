"""Control laws: pure state machines over a flow's row; time and feedback in, rate out."""
