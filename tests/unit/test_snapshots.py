import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hydssp.transport.snapshots import Snapshots

NUM_READERS = 3


class Readers(RuleBasedStateMachine):
    """Readers that take and leave versions in any order, one at a time each, while new ones are published."""

    def __init__(self):
        super().__init__()
        self.snapshots = Snapshots(4, np.dtype("float32"))
        self.newest = -1
        self.written = None
        self.held = {}

    @precondition(lambda self: self.written is None)
    @rule()
    def begin(self):
        self.written = self.snapshots.begin(self.newest + 1)
        self.written[:] = -1.0

    @precondition(lambda self: self.written is not None)
    @rule()
    def end(self):
        self.newest += 1
        self.written[:] = self.newest
        self.written = None
        self.snapshots.end(self.newest)

    @rule(reader=st.integers(0, NUM_READERS - 1))
    def acquire(self, reader):
        if reader in self.held:
            return
        acquired = self.snapshots.acquire()
        if self.newest < 0:
            assert acquired is None
        else:
            assert acquired[0] == self.newest
            self.held[reader] = acquired

    @rule(reader=st.integers(0, NUM_READERS - 1))
    def release(self, reader):
        if reader in self.held:
            self.snapshots.release(self.held.pop(reader)[0])

    @invariant()
    def what_is_read_stays_as_it_is(self):
        for version, weights in self.held.values():
            assert weights.tolist() == [float(version)] * 4

    @invariant()
    def few_arrays_are_enough(self):
        assert self.snapshots.num_arrays <= NUM_READERS + 2


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=50, stateful_step_count=40)


def test_arrays_are_allocated_when_needed_and_used_again():
    snapshots = Snapshots(4, np.dtype("float64"))
    assert snapshots.num_arrays == 0
    for version in range(10):
        snapshots.begin(version)
        snapshots.end(version)
    assert snapshots.num_arrays == 2
    held, _ = snapshots.acquire()
    for version in range(10, 20):
        snapshots.begin(version)
        snapshots.end(version)
    assert snapshots.num_arrays == 3
    snapshots.release(held)
    snapshots.begin(20)
    assert snapshots.num_arrays == 3
