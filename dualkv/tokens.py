"""Token ids: the range that packing takes, where torch need not be imported to know it."""

MAX_TOKEN = 2**32 - 1
