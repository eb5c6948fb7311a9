"""Several processes: started as their users start them, they find what one finds, or say why not.

Each launch loads torch and TransformerLens twice, so that one makes many comparisons (launched.py).
"""

import json
import shutil
import sys

import pytest
import torch
import zoo
from launching import ACCELERATE, TORCHRUN, launch

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.errors import LostProcessError
from resid_patching.lens import resume
from resid_patching.processes import Team

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo and signals, as on Linux")


# One process


def test_a_team_of_one_changes_nothing():
    team = Team()
    tensor = torch.ones(3)
    assert team.sum(tensor) is tensor and tensor.tolist() == [1, 1, 1]
    assert team.gather("a") == ["a"] and team.broadcast("a") == "a" and team.is_first
    assert team.first(lambda: 3) == 3 and list(team.share(4)) == [0, 1, 2, 3]
    team.barrier()
    team.agree(None)
    with pytest.raises(LostProcessError, match="x"):
        team.agree(LostProcessError("x"))


def test_shares_are_all_in_order_and_even():
    for size in range(1, 9):
        for n in range(20):
            shares = [list(Team(rank, size).share(n)) for rank in range(size)]
            assert sum(shares, []) == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert shares[0] or not n


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_process_outside_its_team_cannot_be(rank, size):
    with pytest.raises(ValueError, match=f"process {rank} does not exist: there are {size}"):
        Team(rank, size)


def test_nothing_is_joined_where_nothing_was_launched(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rp.team() == Team()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as one process under torchrun has it
    monkeypatch.setenv("MASTER_PORT", "1")
    assert rp.team() == Team()
    assert not torch.distributed.is_initialized()


# Two processes, the library


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    path = tmp_path_factory.mktemp("launched") / "found.json"
    code, _, err, _ = launch(*TORCHRUN, "tests/launched.py", "compare", path)
    assert code == 0, err[-3000:]
    every = json.loads(path.read_text(encoding="utf-8"))
    assert len(every) == 2
    return every


@pytest.mark.once
@pytest.mark.full
def test_the_team_gathers_in_order_and_sums(found):
    for each in found:
        assert each["size"] == 2
        assert each["team"]["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert each["team"]["broadcast"] == "from 0" and each["team"]["sum"] == [3, 3]


@pytest.mark.full
def test_shared_statistics_are_those_of_one_process(found):
    assert all(each["statistics"] < 1e-13 for each in found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fit", "tolerance"),
    [("ridge", 1e-10), ("adam", 1e-10), ("muon", 1e-5), ("sgd", 1e-5), ("idle", 1e-5)],
)
def test_a_fit_of_two_processes_is_that_of_one_and_the_same_in_both(found, fit, tolerance):
    first, second = (each[fit] for each in found)
    assert first["translators"] <= tolerance and first["kl"] <= tolerance
    assert first["moved"] > 0.1
    assert first["sum"] == second["sum"]


@pytest.mark.full
@pytest.mark.parametrize("which", ["begun", "ended"])
def test_a_fit_goes_on_with_another_number_of_processes(found, which):
    gap = found[0]["resumed"][which]
    assert gap["translators"] <= 1e-5 and gap["kl"] <= 1e-5 and gap["moved"] > 0.1


@pytest.mark.full
def test_a_stream_is_read_once_over_all_processes(found):
    first, second = (each["stream"] for each in found)
    assert first["read"] == list(range(len(first["read"]))) and len(first["read"]) > 100
    assert second["read"] == []
    assert first["read"] == first["read_alone"]
    assert len({*first["hashes"], *second["hashes"]}) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("short", "OutOfDataError: 1000080 tokens"),
        ("unequal", "UnequalProcessesError: process"),
        ("nan", "DivergedError: layer resid_post.0, ridge"),
        ("nan_step", "DivergedError: layer resid_post.0, step 0"),
    ],
)
def test_what_fails_in_one_process_fails_in_all_and_by_name(found, case, words):
    for each in found:
        assert each["errors"][case].startswith(words)


@pytest.mark.full
def test_a_command_that_fails_in_all_processes_says_so_once(found):
    assert [each["errors"]["code"] for each in found] == [2, 2]
    said = "".join(each["errors"]["stderr"] for each in found)
    assert said.count("\n") == 1 and "none.txt" in said


@pytest.mark.full
def test_a_team_that_ends_while_gloo_is_busy_ends_well():
    """Without a group that is left in time, SIGABRT ends one of the processes or both."""
    code, _, err, _ = launch(*TORCHRUN, "tests/launched.py", "leave")
    assert code == 0, err[-3000:]


# Two processes, the command


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A command, and the folder of a fit in which one of two processes was killed."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "text.txt").write_text(zoo.CORPUS, encoding="utf-8")
    command = ["tuned-lens", "fit", "--model", str(zoo.text_folder())]
    command += ["--text", str(folder / "text.txt"), "--tokens", "600", "--validation-tokens", "120"]
    command += ["--length", "12", "--no-ridge", "--steps", "10", "--step-tokens", "8"]
    command += ["--save-every", "2"]
    killed = launch(*TORCHRUN, "tests/launched.py", "kill", 5, *command, "--out", folder / "killed")
    assert main([*command, "--out", str(folder / "whole")]) == 0
    return command, folder, killed


@pytest.mark.full
@pytest.mark.once
def test_a_killed_process_ends_the_command_with_one_line(fitted):
    _, folder, (code, out, err, seconds) = fitted
    assert code != 0 and seconds < 60 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("resid-patching")]
    assert len(lines) == 1 and "process 0 of 2" in lines[0]
    assert "the fit as of step 4 of 10; the same command with --resume continues it" in lines[0]
    about, _ = resume.read(folder / "killed")
    assert about is not None and about["step"] == 4
    assert [path.name for path in (folder / "killed").iterdir()] == [resume.STATE]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_fit_goes_on_to_the_unbroken_fit(fitted, tmp_path, processes):
    command, folder, _ = fitted
    shutil.copytree(folder / "killed", tmp_path / "lens")
    again = [*command, "--out", str(tmp_path / "lens"), "--resume"]
    if processes == 1:
        assert main(again) == 0
    else:
        code, out, err, _ = launch(*ACCELERATE, "scripts/tuned_lens.py", *again[1:])
        assert code == 0, err[-3000:]
        assert out.count("launch   2 processes") == 1 and out.count("mean  ") == 1
    model = rp.load(command[command.index("--model") + 1])
    whole, lens = (rp.TunedLens.load(path, model) for path in (folder / "whole", tmp_path / "lens"))
    assert float((whole.weight - lens.weight).abs().max().detach()) <= 1e-5
    assert float((whole.bias - lens.bias).abs().max().detach()) <= 1e-5
    assert float(whole.weight.abs().max().detach()) > 0.01
    assert lens.record["validation"] == whole.record["validation"]
