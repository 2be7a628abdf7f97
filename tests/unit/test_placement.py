from __future__ import annotations

import pytest

from hydssp.device import RankFacts, place
from hydssp.errors import UserError
from hydssp.launcher import Launch


def rank(host="a", cores=(0, 1, 2, 3), num_cuda=0):
    return RankFacts(host, tuple(cores), num_cuda)


def devices(ranks, device="auto"):
    return [p.device for p in place(ranks, device, None)]


class TestDevices:
    def test_the_servers_node_wastes_no_gpu(self):
        assert devices([rank(num_cuda=2)] * 3) == ["cpu", "cuda:0", "cuda:1"]

    def test_index_among_the_workers_of_the_node(self):
        ranks = [rank("a", num_cuda=2), rank("a", num_cuda=2), *[rank("b", num_cuda=2)] * 2]
        assert devices(ranks) == ["cpu", "cuda:0", "cuda:0", "cuda:1"]

    def test_one_visible_gpu_per_rank(self):
        """As --gpus-per-task leaves it: every rank sees one device, number 0."""
        assert devices([rank(num_cuda=0), *[rank(num_cuda=1)] * 3]) == ["cpu", *["cuda:0"] * 3]

    def test_more_workers_than_gpus_share_and_say_so(self):
        placements = place([rank(num_cuda=2)] * 4, "auto", None)
        assert [p.device for p in placements] == ["cpu", "cuda:0", "cuda:1", "cuda:0"]
        assert [p.shares_device for p in placements] == [False, True, True, True]

    def test_nodes_without_a_gpu(self):
        assert devices([rank("a", num_cuda=1), rank("a", num_cuda=1), rank("b")]) == ["cpu", "cuda:0", "cpu"]
        with pytest.raises(UserError, match="device=cuda: rank 2 on b"):
            devices([rank("a", num_cuda=1), rank("a", num_cuda=1), rank("b")], "cuda")

    def test_cpu_wins_over_gpus(self):
        assert devices([rank(num_cuda=2)] * 3, "cpu") == ["cpu"] * 3


class TestThreads:
    def threads(self, ranks, wanted=None):
        return [p.num_threads for p in place(ranks, "auto", wanted)]

    def test_cores_are_shared_among_the_ranks_on_them(self):
        assert self.threads([rank(cores=range(8))] * 4) == [2] * 4

    def test_more_ranks_than_cores_have_one_thread(self):
        assert self.threads([rank(cores=range(2))] * 4) == [1] * 4

    def test_bound_ranks_have_their_own_cores(self):
        assert self.threads([rank(cores=(0, 1)), rank(cores=(2, 3)), rank("b", cores=(0, 1))]) == [2, 2, 2]

    def test_as_configured(self):
        assert self.threads([rank()] * 2, 3) == [3, 3]


class TestLaunch:
    @pytest.mark.parametrize(
        ("environment", "rank", "size"),
        [
            ({}, 0, 1),
            ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, 4),
            ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"}, 1, 3),
            ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, 5, 8),
            # mpirun inside an allocation: its own variables count
            ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1, 2),
            # a plain python inside a batch script of many tasks
            ({"SLURM_PROCID": "0", "SLURM_NTASKS": "64"}, 0, 1),
        ],
    )
    def test_ranks(self, environment, rank, size):
        launch = Launch.from_environment(environment)
        assert (launch.rank, launch.size) == (rank, size)
        assert launch.is_launched == (size > 1)
