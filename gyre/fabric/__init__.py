"""What holds the ranks together: the world and its groups, collectives by name, and weights moved by pull."""
