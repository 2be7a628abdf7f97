"""A user's mistake: one message from one rank, exit code 2, nothing hangs, nothing is left behind."""

from __future__ import annotations

import pytest
from launching import train

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["paradigm=nope"], ["paradigm=nope", "dssp_bounded"]),
        (["batch_size=abc"], ["batch_size", "abc", "Integer"]),
        (["batchsize=3"], ["batchsize", "did you mean batch_size?"]),
        (["batch_size=0"], ["batch_size=0", "at least 1"]),
        (["paradigm.s_upper=1"], ["paradigm.s_upper=1", "s_lower"]),
        (["paradigm=ssp", "paradigm.s_lower=1"], ["s_lower"]),
    ],
)
def test_configuration(tmp_path, overrides, words, ranks):
    result = train(*overrides, ranks=ranks, folder=tmp_path / "run")
    assert result.code == 2
    assert all(word in result.err for word in words)
    assert result.err.count("hydssp:") == 1  # one message, from one rank
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=lenet"], ["model=lenet", "8x8"]),
        (
            ["data=fashion_mnist", "data.root=nowhere", "model=lenet"],
            ["nowhere", "t10k-labels-idx1-ubyte", "data.root"],
        ),
        (["optimizer._target_=torch.optim.Adafactor"], ["optimizer", "Adafactor"]),
        (["model._target_=torch.nn.Nothing"], ["model._target_=torch.nn.Nothing"]),
        (["data.num_classes=11"], ["data.num_classes=11", "10"]),
        (["straggler=constant", "straggler.factors=[1,2,3]"], ["straggler.factors", "2 workers"]),
        (['parameter_groups=[{pattern:"head.*",lr:1}]'], ["head.*"]),
        (["device=cuda"], ["device=cuda", "rank 1"]),
        (["num_workers=5"], ["num_workers=5", "2"]),
        (["transport=local", "num_workers=2"], ["transport=local", "3"]),
    ],
)
def test_what_only_the_ranks_can_find_out(tmp_path, overrides, words):
    result = train(*overrides, ranks=3, folder=tmp_path / "run")
    assert result.code == 2, result.err
    assert all(word in result.err for word in words), result.err
    assert result.err.count("hydssp:") == 1
    assert "Traceback" not in result.err


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


def test_data_that_one_rank_cannot_read_end_the_job_for_all(tmp_path):
    result = train("data._target_=faults.data_of_one_rank_missing", ranks=4, folder=tmp_path / "run")
    assert result.code == 2
    assert "nowhere" in result.err
    assert "(on rank 2)" in result.err
    assert result.err.count("hydssp:") == 1


def test_ranks_with_different_models_are_refused(tmp_path):
    result = train("model._target_=faults.model_of_another_size", ranks=3, folder=tmp_path / "run")
    assert result.code == 2
    assert "rank 2 has another model" in result.err


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_questions_to_the_program(tmp_path, flags, ranks):
    result = train(*flags, ranks=ranks, folder=tmp_path / "run")
    assert result.code == 0
    assert result.out.count("batch_size: 32") == 1
    assert not list(tmp_path.iterdir())
