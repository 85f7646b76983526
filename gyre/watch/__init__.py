"""What people look at while a run goes on. Reads snapshots, never the machine behind them."""
