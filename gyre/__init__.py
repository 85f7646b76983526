"""gyre: elastic online RL for agents, trained through unmodified harnesses."""
