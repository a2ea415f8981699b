"""TRL says on the network who trains, unless it is offline; read when it is imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
