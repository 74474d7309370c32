"""Other projects' MoE operators, each behind `Peer`, and what compares ours with them."""
