"""Work plans, made on the host: the work items of the forward, of the forward over trees (`paths`) and of the backward,
and the schedule by which the forward's clusters take them."""
