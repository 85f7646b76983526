"""Settings of a run: the schema (`schema.py`), its closed choices and the strict TOML loader (`load.py`)."""
