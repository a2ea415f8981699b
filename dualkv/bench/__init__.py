"""`dualkv bench`: packed attention against other ways to compute it, timed on this machine's GPU."""
