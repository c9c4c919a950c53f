"""The supervisor of one host (`launch.py`): standard library only, because it runs before anything is installed."""
