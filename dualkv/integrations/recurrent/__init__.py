"""Recurrent layers on packed rows: a segment starts from the state that its parent leaves.

:mod:`.waves` orders the segments of a layout, and :mod:`.ops` runs convolutions and scans in that order.
:mod:`.kernels` chooses flash-linear-attention's kernels, :mod:`.walked` keeps what parts of a walked tree start from,
and :mod:`.sharded` exchanges rows with other ranks. :mod:`.rules` has what layers of several libraries compute with
these; their own integrations lead them there.
"""
