"""Compile a specification into a loadable kernel."""


class KernelError(RuntimeError):
    """A kernel cannot be found, compiled or loaded: which, why, and what to do, in one sentence."""
