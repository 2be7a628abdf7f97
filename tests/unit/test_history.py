from __future__ import annotations

import random

import torch

from hydssp.update.history import VersionHistory


class World:
    """Weights that hold their own version number in every element."""

    def __init__(self, num_workers):
        self.weights = torch.zeros(10)
        self.history = VersionHistory(self.weights)
        self.granted_version = {}
        for worker in range(num_workers):
            self.grant(worker)

    def grant(self, worker):
        self.history.granted(worker)
        self.granted_version[worker] = self.history.version

    def update(self, workers):
        self.history.begin_update(workers)
        for a in (0, 4, 8):
            if (room := self.history.room(a, min(a + 4, 10))) is not None:
                room.copy_(self.weights[a : a + 4])
            self.weights[a : a + 4] += 1
        self.history.end_update(workers)
        for worker in workers:
            del self.granted_version[worker]

    def staleness(self, worker):
        return self.history.version - self.granted_version[worker]


def test_every_granted_version_is_found_again_and_no_more_are_kept():
    draw = random.Random(0)
    world = World(5)
    for _ in range(500):
        group = draw.sample(sorted(world.granted_version), draw.randint(1, len(world.granted_version)))
        for worker in group:
            used, is_exact = world.history.used(world.staleness(worker))
            assert is_exact
            expected = world.granted_version[worker]
            assert (used is None) == (expected == world.history.version)
            assert used is None or (used == expected).all()
        world.update(group)
        for worker in range(5):  # held workers stay without a grant for a while
            if worker not in world.granted_version and draw.random() < 0.7:
                world.grant(worker)
        if not world.granted_version:
            world.grant(0)
    assert world.history.num_copies <= 5
    assert world.history.num_approximated == 0


def test_nothing_is_copied_for_one_worker_or_for_rounds():
    for num_workers in (1, 4):
        world = World(num_workers)
        for _ in range(5):
            world.update(list(range(num_workers)))
            for worker in range(num_workers):
                world.grant(worker)
        assert world.history.num_copies == 0


def test_one_copy_serves_all_who_were_granted_the_version():
    world = World(4)
    world.update([0])
    assert world.history.num_copies == 1
    world.update([1])
    used, _ = world.history.used(2)
    assert (used == 0).all()
    world.update([2])
    world.update([3])
    for worker in range(4):
        world.grant(worker)
    world.update([0])
    assert world.history.num_copies == 1  # the same memory again


def test_a_version_that_nobody_was_granted_is_replaced_by_the_nearest_and_counted():
    world = World(2)
    for _ in range(5):
        world.update([0])
        world.grant(0)
    # Worker 1 was granted version 0 and, its slot overwritten, read a newer one; versions 0 and 5 (now) are there.
    used, is_exact = world.history.used(4)
    assert (used == 0).all()
    assert not is_exact
    used, is_exact = world.history.used(1)
    assert used is None
    assert not is_exact
    assert world.history.num_approximated == 2


def test_a_grant_replaces_one_whose_gradient_never_came():
    world = World(2)
    world.update([0])
    world.grant(0)
    world.grant(1)  # its push was refused
    world.update([0])
    used, is_exact = world.history.used(1)
    assert (used == 1).all()
    assert is_exact
    assert world.history.num_copies == 1
