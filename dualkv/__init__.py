"""Training on many rollouts of one prompt without paying for the prompt more than once."""

from dualkv.attention import attention
from dualkv.layout import Layout

__version__ = "0.1.0"
__all__ = ["Layout", "attention"]
