"""A user's mistake: one message from one rank, exit code 2, nothing hangs, nothing is left behind."""

from __future__ import annotations

import pytest
from launching import train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["num_workers=5"], ["num_workers=5", "2"]),
        (["transport=local", "num_workers=2"], ["transport=local", "3"]),
    ],
)
@pytest.mark.once
def test_a_number_of_ranks_that_does_not_fit(tmp_path, overrides, words):
    result = train(*overrides, ranks=3, folder=tmp_path / "run")
    assert result.code == 2, result.err
    assert all(word in result.err for word in words), result.err
    assert result.err.count("hydssp:") == 1
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def test_an_existing_run_is_not_overwritten(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine").write_text("precious")
    result = train("epochs=1", ranks=3, folder=folder)
    assert result.code == 2
    assert "run_dir" in result.err
    assert [p.name for p in folder.iterdir()] == ["mine"]


def test_one_process_is_told_what_to_do(tmp_path):
    for ranks in (0, 1):
        result = train(ranks=ranks, folder=tmp_path / "run")
        assert result.code == 2
        assert "at least 2 ranks" in result.err
        assert "transport=local" in result.err


@pytest.mark.parametrize("rank", [0, 1])
def test_an_mpirun_of_another_mpi_library_is_noticed(tmp_path, rank):
    """Every process then finds itself alone; the first one says so."""
    variables = {"MV2_COMM_WORLD_RANK": str(rank), "MV2_COMM_WORLD_SIZE": "3"}
    result = train(folder=tmp_path / "run", variables=variables)
    assert result.code == 2
    if rank == 0:
        assert "started 3 processes" in result.err
        assert "sees each of them alone" in result.err
    else:
        assert "hydssp:" not in result.err


@pytest.mark.once
@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_questions_to_the_program(tmp_path, flags, ranks):
    result = train(*flags, ranks=ranks, folder=tmp_path / "run")
    assert result.code == 0
    assert result.out.count("batch_size: 32") == 1
    assert not list(tmp_path.iterdir())
