"""How well the straggler verdict finds slow ranks: in traces made from measured noise, and in real runs."""
