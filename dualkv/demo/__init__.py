"""`dualkv demo`: updates of a language model, prompts replicated and packed, side by side."""
