"""Inputs of benchmarks without a GPU."""

from dualkv.bench import inputs

ROLLOUTS = [{"prompt": "abcde", "responses": ["abc", [1, 2]], "rewards": [0, 1]},
            {"prompt": [7] * 9, "responses": ["", "xy", "z"], "rewards": [0, 1, 1]}]  # fmt: skip


class Fp32Inputs(inputs.Inputs):
    def __init__(self, workload):
        super().__init__(workload, "cpu")
        self.q, self.k, self.v, self.dout = (x.float() for x in (self.q, self.k, self.v, self.dout))
