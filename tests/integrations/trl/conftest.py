"""TRL says on the network who trains, unless it is offline, and warns of what is experimental; read at its import."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
